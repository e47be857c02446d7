"""Views of runs that change nothing: a dashboard in the terminal, a page in the browser, and a list of runs."""
