"""The time of one step on GPUs, from the program that XLA's GPU compiler scheduled."""
