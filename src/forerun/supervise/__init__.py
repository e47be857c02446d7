"""One supervisor per host: starts the process that trains, watches its progress, and restarts the job as a whole."""
