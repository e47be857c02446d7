"""The controller of a cloud run: decisions as pure functions, and a loop that carries them out."""
