"""Checks of this machine and its installation: one function per check.

Each check examines one thing, and returns what it found and the command that fixes it.
"""
