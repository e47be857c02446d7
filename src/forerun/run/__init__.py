"""Training runs: the phases of a run, its training loop, and the reaction to failures.

`train.train` is the entry point. It connects the data, the compiled step, checkpoints, validation and tracking. The
step itself is built in `forerun.program`.
"""
