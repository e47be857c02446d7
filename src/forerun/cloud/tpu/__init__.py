"""The provider of the Cloud TPU API (v2 and v2alpha1): nodes and queued resources of v2 to v6e."""
