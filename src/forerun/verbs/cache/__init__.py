"""`forerun cache`."""
