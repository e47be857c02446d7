"""Building blocks of models: parameter specs, weight leaf types, layers, attention and logical axes.

A spec gives shape, dtype, axes and initial values before any array exists. Nothing here depends on a particular mesh
or on training.
"""
