"""`forerun sweep`."""
