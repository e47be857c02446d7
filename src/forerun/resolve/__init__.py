"""Resolution of a job: `resolve_model` fills in what needs no data, and `ResolvedJob.with_data` the rest."""
