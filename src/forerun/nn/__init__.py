"""The parts that models are made of: parameter specs, weights as leaf types, layers, logical axes.

A spec says shape, dtype, axes and initial values before any array exists. Nothing here knows meshes or training.
"""
