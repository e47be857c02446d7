"""Sources of training data: finding files, opening them, and reading their rows with the place of each row."""
