"""What `forerun data` shows: the sources, the lengths, the packing, and rows exactly as the model will see them."""
