"""Hours, dollars and saves of a complete run."""
