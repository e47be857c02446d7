"""`forerun tokenizer`."""
