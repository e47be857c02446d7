"""Families of Hugging Face checkpoints, one file each: what its config.json means, and what its tensors are called."""
