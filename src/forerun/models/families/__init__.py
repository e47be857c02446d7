"""Families of Hugging Face checkpoints, one module each: how to read config.json, and the names of the tensors."""
