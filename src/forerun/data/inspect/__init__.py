"""The report of `forerun data`: sources, lengths, packing, and rows exactly as the model will see them."""
