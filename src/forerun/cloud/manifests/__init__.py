"""Files that start a job with a scheduler: a JobSet for GKE, a task for SkyPilot, a batch script for Slurm.

Each runs the same supervised command as a cloud run: `forerun train --supervise`, with one process per host.
"""
