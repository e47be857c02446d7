"""The report of a run as a page that a local server keeps up to date."""
