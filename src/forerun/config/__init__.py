"""The job file: its schema, the YAML reader, `a.b=c` overrides, and the origin of each value.

This package does not import jax and does not access devices. A loaded job is complete and immutable.
"""
