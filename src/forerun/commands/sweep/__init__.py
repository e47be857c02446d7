"""`forerun sweep`: train a job with all combinations of some values, and compare the results."""
