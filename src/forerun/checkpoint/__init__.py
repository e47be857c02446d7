"""Checkpoints: the state is saved while the training continues, and can be restored onto any mesh."""
