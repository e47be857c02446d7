"""Values that `forerun ps`, `logs`, `stop`, `down` and `fetch` show, read from providers and from records of runs."""
