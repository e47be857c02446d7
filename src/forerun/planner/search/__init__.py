"""Search for the best slice, mesh, micro-batch size and remat policy."""
