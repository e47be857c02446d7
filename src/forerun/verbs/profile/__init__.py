"""`forerun profile`."""
