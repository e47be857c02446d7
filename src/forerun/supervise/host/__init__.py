"""The supervisor of one host. It runs one worker and reports to the leader."""
