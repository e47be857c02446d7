"""The compiler's memory report, and its breakdown by contents."""
