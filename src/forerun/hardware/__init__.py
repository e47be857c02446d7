"""Tables of chips, slices and prices, mesh arithmetic, and the devices of this machine. Does not import jax."""
