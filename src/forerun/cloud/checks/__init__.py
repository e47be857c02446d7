"""The checks of `forerun doctor --cloud`: account, project, permissions, quota, network, bucket and disk."""
