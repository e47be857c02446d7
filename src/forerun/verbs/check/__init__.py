"""`forerun check`."""
