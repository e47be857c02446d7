"""forerun: plan what you train, then train what you planned."""

__version__ = "0.1.0"
