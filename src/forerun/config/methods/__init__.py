"""The sections of a job that select a training method: adapters, rounding, a teacher, preferences, objectives."""
