"""Training objectives: functions of a model and a batch that return a loss and metrics.

They do not depend on the optimizer or on the number of devices.
"""
