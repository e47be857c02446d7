"""Models for `forerun generate`, `chat` and `eval`."""
