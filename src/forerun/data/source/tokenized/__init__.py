"""Readers of files that hold token ids: those of Megatron and of datatrove."""
