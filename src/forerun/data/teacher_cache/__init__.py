"""Cached teacher logits on disk: written once by `forerun cache`, read in the training of every student."""
