"""Where token stores lie: a folder of this machine or a bucket, with verified reads and a local cache of blocks."""
