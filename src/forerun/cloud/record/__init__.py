"""The record of a cloud run: small JSON files in the run's bucket folder, which every controller and host reads."""
