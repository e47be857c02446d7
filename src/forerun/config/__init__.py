"""The job file: its schema, YAML and `a.b=c` overrides, and where each value came from.

Knows nothing of jax or devices. A job that leaves this room is complete and frozen.
"""
