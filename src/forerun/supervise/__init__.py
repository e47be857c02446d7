"""Supervision: on each host, a supervisor starts the training process and monitors it. Failed jobs are restarted."""
