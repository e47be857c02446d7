"""`forerun export`."""
