"""Plans as tables, JSON and HTML pages, and suggestions for a job that does not fit."""
