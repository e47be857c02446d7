"""The worker's part of supervision: reports of progress, and stops."""
