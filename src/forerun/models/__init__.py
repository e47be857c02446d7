"""Model families, one file each: specs, apply, FLOPs and the names of Hugging Face's weights.

A model is written for one device. Parallelism, LoRA and quantization come to it from outside, through its specs.
"""
