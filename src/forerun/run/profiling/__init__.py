"""Profiles of training steps: recording with the JAX profiler, and a text summary of the recording."""
