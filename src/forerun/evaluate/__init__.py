"""Evaluation of a model: log-probabilities of given tokens, loss on held-out text, and tasks of lm-eval.

Depends on models and arrays only. Tokenizers, files and generation are passed in as functions.
"""
