"""Compile the job's own Program for slices that are not here, and say whether it fits and what fills the memory.

The Program is the one that `train` runs; there is no second model of the job that could drift from it.
"""
