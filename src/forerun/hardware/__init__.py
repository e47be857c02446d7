"""Chips, slices and prices as sourced tables, mesh arithmetic, and the devices that are here. No jax at import."""
