"""Text generation with a key/value cache and one compiled program per length bucket.

Depends on models and arrays only. Tokenizers and files are passed in as functions.
"""
