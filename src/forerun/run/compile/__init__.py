"""The compiled step of a run: its compilation, its cache, and times of earlier compilations."""
