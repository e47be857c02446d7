"""Connections to the hosts of a slice by OpenSSH, with pinned host keys, and the provider of existing machines."""
