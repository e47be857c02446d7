"""What a run tells: its metrics on disk, its progress on the screen."""
