from tiny_job import job_file, make_job

__all__ = ["job_file", "make_job"]
