"""Weights between Hugging Face checkpoints and the devices, one tensor at a time, in either direction."""
