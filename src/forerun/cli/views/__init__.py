"""Commands that show runs and change nothing, one file each."""
