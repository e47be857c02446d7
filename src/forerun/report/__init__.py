"""What a run has recorded: its files as one value, and the pages and tables that show it."""
