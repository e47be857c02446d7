"""Displays of a run: live on a terminal, plain lines elsewhere."""
