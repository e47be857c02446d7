"""Training methods: an objective and, for LoRA and QAT, transforms that replace plain weights by other leaf types.

The training loop and the models do not depend on the method.
"""
