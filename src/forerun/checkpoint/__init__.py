"""Saving the state while training goes on, and reading it back onto any mesh."""
