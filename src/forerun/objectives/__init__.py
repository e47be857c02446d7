"""What is to become small: a batch and a model give a loss and metrics.

Nothing here knows optimizers or devices.
"""
