"""Compilation of a job for a slice in a child process, and the cache of results."""
