"""The agent on each host of a cloud run.

It reports the host's progress to the bucket, copies the log, obeys stop requests, enforces the deadline, exports the
finished model and deletes the slice at the end. It never changes or removes results.
"""
