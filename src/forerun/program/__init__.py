"""The train step as a pure function, with its state, its optimizer and its schedule.

`build` returns a `Program`: the step, its abstract arguments and their shardings. The devices may be real ones or a
topology description. This package does not access files or the network.
"""
