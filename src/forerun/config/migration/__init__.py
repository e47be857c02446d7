"""Keys of other trainers: what each means in a job, for errors, for `forerun convert` and for the migration page."""
