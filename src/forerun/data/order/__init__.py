"""The content of each batch: packing, mixture and permutation, as pure functions of the seed and the step."""
