"""Records of a run: metrics on disk, the display of progress, and trackers."""
