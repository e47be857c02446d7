"""The keeper: a small rented machine that runs the controller, so that the user's machine may be off."""
