"""Training data: from files to tokens, packed rows, and batches whose order depends only on the seed and the step."""
