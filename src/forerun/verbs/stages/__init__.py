"""Jobs with stages."""
