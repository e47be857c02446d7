"""The folder of a run: its files, their copies in a bucket, its stages and the code of custom classes."""
