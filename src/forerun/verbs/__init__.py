"""The commands, one module or package each: a function, its options, and a result that prints itself."""
