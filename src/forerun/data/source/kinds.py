"""The kinds of data files, by the endings of their names."""

from __future__ import annotations

from forerun.data.text import TEXT_SUFFIXES

KINDS = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
}
TABLE_KINDS = ("parquet", "arrow")
PACKED = (".gz", ".zst")  # may follow any other ending
# Data files of a dataset on the hub. Of text files only .txt counts: others may be a licence or a card.
DATASET_ENDINGS = tuple(ending for ending, kind in KINDS.items() if kind != "text")
DATASET_TEXT_ENDINGS = (".txt",)
