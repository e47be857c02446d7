"""Prediction of the time of a step from the program that the compiler scheduled."""
