"""Storage of checkpoints: a folder or a bucket."""
