"""The version of forerun."""

__version__ = "0.1.0"
