"""How good a model is: log-probabilities of given tokens, loss on held-out text, and lm-eval's tasks.

Knows models and arrays; tokenizers, files and generation only as functions handed in.
"""
