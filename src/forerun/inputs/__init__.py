"""Inputs of the commands: the data of a job, weights, tokenizers and the folder of a run."""
