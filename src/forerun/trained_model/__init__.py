"""A trained model for use: its source, weights, chat format and exported classes."""
