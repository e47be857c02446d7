"""A model by its name: a hub repository or a local folder, its files, and what they may contain.

Reads safetensors, JSON and tokenizer files; nothing that is read here can run. Knows nothing of jax or models.
"""
