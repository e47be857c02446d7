"""Verified reads of token stores in a bucket, through a local cache of blocks."""
