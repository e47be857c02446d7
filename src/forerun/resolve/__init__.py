"""The resolved job: the type between the job file and the Program. See `resolved_job.py`."""
