"""Models: parameter specs, forward pass, FLOPs, and the Hugging Face names of their weights.

A model is written for one device. Parallelism, LoRA and quantization are added from outside, through its specs.
"""
