"""The command line: words and exit codes.

Reads arguments, calls one function of a lower floor, prints what came back. Nothing heavy is imported before a
command needs it, so `--help` and a mistake in a job file are reported immediately.
"""
