"""Folders and buckets: addresses, listing, ranged reads, conditional writes and retries."""
