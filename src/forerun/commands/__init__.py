"""The work of `check`, `export`, `eval` and `cache`. Functions return results; `cli` parses and prints."""
