"""Collectives of a scheduled program: their groups, their strategies and their time on the torus of a slice."""
