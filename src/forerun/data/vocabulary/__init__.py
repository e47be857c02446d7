"""Tokenizers from text: training of byte-level BPE, the files of a tokenizer, and a report of how it splits text."""
