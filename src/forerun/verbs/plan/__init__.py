"""`forerun plan` and `forerun plan --search`."""
