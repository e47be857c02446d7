"""Rendering of untrusted chat templates in a child process."""
