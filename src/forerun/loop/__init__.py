"""The run from start to end, in announced phases: it puts data, program, checkpoints and tracking together.

The step itself comes from `program`; here is the order of things, and what happens when one of them fails.
"""
