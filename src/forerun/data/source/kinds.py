"""The kinds of data files, by the endings of their names, and the names of the files that belong to them."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.data.text import TEXT_SUFFIXES
from forerun.storage.address import Address

KINDS = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
    ".bin": "megatron",
    ".ds": "datatrove",
}
TABLE_KINDS = ("parquet", "arrow")
TOKEN_KINDS = ("megatron", "datatrove")  # files of token ids, with an index in another file
IN_PARTS = (*TABLE_KINDS, *TOKEN_KINDS)  # kinds that cannot be compressed as a whole
PACKED = (".gz", ".zst")  # may follow any other ending
# Data files of a dataset on the hub. Of text files only .txt counts: others may be a licence or a card. Files ending
# in .bin are usually weights there.
DATASET_ENDINGS = tuple(ending for ending, kind in KINDS.items() if kind != "text" and kind not in TOKEN_KINDS)
DATASET_TEXT_ENDINGS = (".txt",)

MEGATRON_INDEX = ".idx"
DATATROVE_INDEX, DATATROVE_LOSS, DATATROVE_ABOUT = ".index", ".loss", ".metadata"  # these follow the ending .ds
_COMPANIONS = {"megatron": (MEGATRON_INDEX,), "datatrove": (DATATROVE_INDEX, DATATROVE_LOSS)}
_OF_DATATROVE = tuple(f".ds{ending}" for ending in (DATATROVE_INDEX, DATATROVE_LOSS, DATATROVE_ABOUT))


def companions_of(kind: str) -> tuple[str, ...]:
    """Return the endings of the files that determine the documents of a data file of this kind."""
    return _COMPANIONS.get(kind, ())


def companion(path: str, ending: str) -> str:
    """Return the name of a file that belongs to `path`: `a.bin` and `.idx` -> `a.idx`, `a.ds` -> `a.ds.index`."""
    base, mark, query = path.partition("?") if Address.of(path).is_web else (path, "", "")
    return (base[: -len(".bin")] if ending == MEGATRON_INDEX else base) + ending + mark + query


def data_name(name: str) -> str:
    """Return the name of the data file that `name` belongs to: `a.idx` -> `a.bin`. Other names are unchanged."""
    if name.endswith(MEGATRON_INDEX):
        return name.removesuffix(MEGATRON_INDEX) + ".bin"
    return name.rpartition(".")[0] if name.endswith(_OF_DATATROVE) else name


def data_names(names: Iterable[str], *, named: bool = False) -> list[str]:
    """Return the names of data files in a list of files, without the other files that belong to them.

    An index stands for its data file, so that a missing data file is noticed. In a folder, files ending in .bin count
    only if there are also files ending in .idx: they may be weights. If `named` (by a glob), they always count.
    """
    found = set(names)
    kept = {name for name in found if not name.endswith((MEGATRON_INDEX, ".bin", *_OF_DATATROVE))}
    kept |= {data_name(name) for name in found if name.endswith(f".ds{DATATROVE_INDEX}")}
    binary = {name for name in found if name.endswith(".bin")}
    indexed = {data_name(name) for name in found if name.endswith(MEGATRON_INDEX)}
    if named or (binary and indexed):
        kept |= binary | indexed
    return sorted(kept)
