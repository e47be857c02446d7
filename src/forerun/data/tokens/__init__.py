"""Tokenization: worker processes render and encode rows, and store the tokens in an immutable store."""
