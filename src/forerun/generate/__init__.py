"""Text from a trained model: a key/value cache, one compiled program per bucket of lengths, and token after token.

Knows models and arrays; tokenizers and files only as functions handed in.
"""
