"""The simulated timeline of a step, and its file in the trace event format that Perfetto opens."""
