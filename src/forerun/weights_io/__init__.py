"""Reading and writing of Hugging Face checkpoints: weights move to and from the devices one tensor at a time."""
