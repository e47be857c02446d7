"""Exit codes of all commands, and of the processes of a supervised run.

This module imports nothing: the handler of Ctrl-C needs it before anything else is imported.
"""

OUR_BUG = 1
USER_MISTAKE = 2
ENDED = 70  # too many restarts without progress
STORAGE_FAILED = 74  # a disk or a bucket fails or is full (EX_IOERR)
STOPPED = 75  # stopped as asked, can be resumed (EX_TEMPFAIL)
DAMAGED = 76  # the state in memory may be wrong; restart from the newest checkpoint
INTERRUPTED = 130  # stopped by Ctrl-C
PIPE_CLOSED = 141  # the reader of the output has exited
