"""Engines that build the units of a store: a pool of processes on this machine, or a Ray cluster."""
