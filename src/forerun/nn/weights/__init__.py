"""Leaf types for weight matrices: dense, low-rank adapter, quantized, and fake-quantized for training."""
