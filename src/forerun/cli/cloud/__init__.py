"""Commands of cloud runs, one file each."""
