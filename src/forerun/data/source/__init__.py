"""Where rows come from: files found, opened and read row by row, with every row's place known."""
