"""Access to the files of a model, in a hub repository or a local folder.

Reads safetensors, JSON and tokenizer files. All of them are data; no code from a file runs, except chat templates in a
sandboxed child process. Does not import jax.
"""
