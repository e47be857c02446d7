"""The leader, which runs on host 0. It decides when all workers start, stop and restart."""
