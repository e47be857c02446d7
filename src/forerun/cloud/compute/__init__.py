"""Compute Engine: single machines, and groups of machines that form a TPU slice of several hosts."""
