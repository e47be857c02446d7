"""Datasets on the Hugging Face hub. Their files are fetched into the cache of the hub client, or read by ranges.

    hf://datasets/owner/name[@revision][/file, folder or glob]

Only the selected files and the card of the dataset (README.md) are fetched. Scripts of a dataset are never run. The
list of all files is stored next to the cached ones, so that an incomplete dataset is detected offline.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from forerun.data.source.kinds import DATASET_ENDINGS, DATASET_TEXT_ENDINGS, PACKED
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.hub.repository import Listing, Repository, is_commit, is_offline
from forerun.units import GIB, MIB

# ---- Selection of the training files, by the card of the dataset or by the names of its files ----
#
# The selection uses names only and fetches nothing. If it is ambiguous, an error lists the paths to choose from.


_METADATA_FILES = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SHARD = re.compile(r"(\w[\w.-]*?)[-.]\d{5}-of-\d{5}\b.*")
_NO_SPLIT = {"data", "part", "shard", "chunk", "file"}
_MAX_SHOWN = 8


def choose(names: Iterable[str], path: str, card: Mapping[str, Any] | None, address: str) -> list[str]:
    """Return the files to train on, sorted.

    Args:
        names: All files of the repository.
        path: The part of `address` inside the repository: a file, a folder, a glob, or "" for the complete dataset.
        card: The front matter of the card, or None. It is used only if `path` is "".
        address: The address that the user gave, for errors.

    Raises:
        UserError: No files can be read, or several sets of files match.
    """
    every = [name for name in names if ".." not in name.split("/") and not name.startswith("/")]
    data = _data_files(every)
    root = address.removesuffix(f"/{path}") if path else address
    if path and path in every:
        if path not in data and _ending(path) not in DATASET_TEXT_ENDINGS:
            raise _no_data(address, [path])
        return [path]
    if path and glob.has_magic(path):
        pattern = _pattern(path)
        return _of_one_kind(_data_files(name for name in every if pattern(name)), every, root, address)
    if path:
        below = [name for name in data if name.startswith(f"{path}/")]
        return _split(below, every, root, address)
    if configs := _configs(card):
        return _of_card(configs, data, every, root)
    folders = _folders(data)
    if len(folders) > 1:
        raise _ambiguous(
            address, "it has several folders, and no card selects one", [f"{root}/{name}" for name in folders]
        )
    return _split(data, every, root, address)


def front_matter(text: str) -> dict[str, Any] | None:
    """Return the YAML at the head of a dataset's card, or None if it is missing or invalid."""
    import yaml

    found = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", text, re.DOTALL)
    try:
        tree = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None


def _data_files(names: Iterable[str]) -> list[str]:
    """Return the names of data files, sorted. Text files count only if there are no others: they may be a licence."""
    seen = [name for name in sorted(names) if not any(part.startswith(".") for part in name.split("/"))]
    data = [
        name for name in seen if _ending(name) in DATASET_ENDINGS and PurePosixPath(name).name not in _METADATA_FILES
    ]
    return data or [name for name in seen if _ending(name) in DATASET_TEXT_ENDINGS]


def _ending(name: str) -> str:
    path = PurePosixPath(name.lower())
    return (PurePosixPath(path.stem) if path.suffix in PACKED else path).suffix


def _pattern(path: str) -> Any:
    """Return a function that matches names with a glob. `*` matches inside a folder, `**` at any depth."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", path)
    special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    text = ""
    for part in parts:
        if part in special:
            text += special[part]
        elif part.startswith("[") and part.endswith("]"):
            text += fnmatch.translate(part).removeprefix("(?s:").rpartition(")")[0]
        else:
            text += re.escape(part)
    return re.compile(text, re.DOTALL).fullmatch


def _split_of(name: str) -> str | None:
    """Return the split that the name of a file contains, or None.

    `data/train-00000-of-00002.parquet`, `train.jsonl` and `en/train/0000.parquet` are in the split `train`.
    """
    *folders, file = name.split("/")
    shard = _SHARD.fullmatch(file)
    stem = shard[1] if shard else file.partition(".")[0] or file
    for part in (stem, *reversed(folders)):
        for word in re.split(r"[^A-Za-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return (
                    part
                    if shard and part == stem and part.lower() not in _SPLIT_WORDS and "_" in part
                    else _SPLIT_WORDS[word]
                )
    return stem if shard and stem.lower() not in _NO_SPLIT and len(folders) <= 1 else None


def _folders(data: list[str]) -> list[str]:
    """Return the folders at the first depth that has several, or [] if there is no choice to make.

    Folders with the name of a split do not count.
    """
    kept = [[part for part in name.split("/")[:-1] if part.lower() not in _SPLIT_WORDS] for name in data]
    for depth in range(max(map(len, kept), default=0)):
        found = sorted({"/".join(parts[: depth + 1]) for parts in kept if len(parts) > depth})
        if len(found) > 1:
            return found
    return []


def _split(data: list[str], every: list[str], root: str, address: str) -> list[str]:
    """Return the files of the split `train`, of the only split, or all files if their names contain no split."""
    by_split: dict[str | None, list[str]] = {}
    for name in data:
        by_split.setdefault(_split_of(name), []).append(name)
    named = sorted(split for split in by_split if split is not None)
    if not named:
        return _of_one_kind(data, every, root, address)
    if "train" not in named and len(named) > 1:
        globs = [f"{root}/{_glob_of(by_split[split])}" for split in named]
        raise _ambiguous(address, f"its splits are {', '.join(named)}, none is train", globs)
    split = "train" if "train" in named else named[0]
    return _of_one_kind(by_split[split], every, root, address)


def _of_one_kind(found: list[str], every: list[str], root: str, address: str) -> list[str]:
    """Return these files, sorted. Raise UserError if there are none, or if they have several endings."""
    if not found:
        raise _no_data(address, every)
    by_ending: dict[str, list[str]] = {}
    for name in found:
        by_ending.setdefault(_ending(name), []).append(name)
    if len(by_ending) > 1:
        globs = [f"{root}/{_glob_of(names)}" for names in by_ending.values()]
        raise _ambiguous(address, f"it has its data as {' and as '.join(sorted(by_ending))}", globs)
    return sorted(found)


def _configs(card: Mapping[str, Any] | None) -> dict[str, dict[str, list[str]]]:
    """Return configuration -> split -> patterns from a card, or {} if its structure is not understood.

    If the card has a default configuration, only this one is returned.
    """
    listed = (card or {}).get("configs")
    configs: dict[str, dict[str, list[str]]] = {}
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict) or not (splits := _card_splits(entry)):
            return {}
        name = str(entry.get("config_name", "default"))
        if entry.get("default") is True:
            return {name: splits}
        configs[name] = splits
    return {"default": configs["default"]} if "default" in configs else configs


def _card_splits(entry: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return split -> patterns of a configuration. The split is "" for a folder without a list of files."""
    given, folder = entry.get("data_files"), entry.get("data_dir")
    prefix = f"{folder.strip('/')}/" if isinstance(folder, str) and folder.strip("./") else ""
    if given is None:
        return {"": [f"{prefix}**"]} if prefix else {}
    splits: dict[str, list[str]] = {}
    for part in given if isinstance(given, list) else [given]:
        split, paths = (part.get("split"), part.get("path")) if isinstance(part, dict) else ("train", part)
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(split, str) or not isinstance(paths, list) or not all(isinstance(p, str) for p in paths):
            return {}
        splits.setdefault(split, []).extend(prefix + path.removeprefix("./") for path in paths)
    return splits


def _of_card(configs: dict[str, dict[str, list[str]]], data: list[str], every: list[str], root: str) -> list[str]:
    """Return the files of the split `train`, or of the only split, in the only configuration of a card."""
    if len(configs) > 1:
        first = {name: (splits.get("train") or next(iter(splits.values())))[0] for name, splits in configs.items()}
        raise _ambiguous(
            root,
            f"its configurations are {_shortened(configs)}; none is the default",
            [f"{root}/{p}" for p in first.values()],
        )
    (splits,) = configs.values()
    if "train" not in splits and len(splits) > 1:
        globs = [f"{root}/{patterns[0]}" for patterns in splits.values()]
        raise _ambiguous(root, f"its splits are {_shortened(splits)}, none is train", globs)
    split = "train" if "train" in splits else next(iter(splits))
    patterns = [_pattern(pattern) for pattern in splits[split]]
    found = [name for name in _data_files(every) if any(pattern(name) for pattern in patterns)]
    return _of_one_kind(found, every, root, root) if split else _split(found, every, root, root)


def _glob_of(names: list[str]) -> str:
    """Return one glob for these names, from their common start and their ending."""
    if len(names) == 1:
        return names[0]
    first, last = min(names), max(names)
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    start = re.sub(r"\d+$", "", first[:same])
    packed = "*" if any(name.lower().endswith(PACKED) for name in names) else ""
    deep = any("/" in name[len(start) :] for name in names)
    folder = start.rpartition("/")[0]
    return f"{folder}/**/*{_ending(first)}{packed}".lstrip("/") if deep else f"{start}*{_ending(first)}{packed}"


def _ambiguous(address: str, why: str, choices: list[str]) -> UserError:
    """Return the error for an ambiguous address, with the addresses to choose from."""
    more = f" (and {len(choices) - _MAX_SHOWN} more)" if len(choices) > _MAX_SHOWN else ""
    return UserError(
        "E-DATA-055",
        f"data.path: {address} has several sets of data",
        why=why,
        fix=f"name one: {', '.join(choices[:_MAX_SHOWN])}{more}",
    )


def _no_data(address: str, every: list[str]) -> UserError:
    """Return the error for an address without data files, or with a script only."""
    # If the dataset has data files elsewhere, its script is irrelevant.
    scripts = [name for name in every if name.endswith(".py")] if not _data_files(every) else []
    named = re.match(r"hf://datasets/[^/@]+/[^/@]+", address)
    root = named[0] if named else address
    kinds = ", ".join(DATASET_ENDINGS + DATASET_TEXT_ENDINGS)
    if scripts:
        return UserError(
            "E-DATA-056",
            f"data.path: {address} has no data files, and the dataset has the script {scripts[0]}",
            why="forerun never runs the script of a dataset",
            fix=f"use the Parquet conversion of the hub, if it exists: {root}@refs/convert/parquet",
        )
    return UserError(
        "E-DATA-057",
        f"data.path: no data in {address}",
        why=f"its files: {_shortened(sorted(every)) or 'none'}; forerun reads {kinds}, optionally with .gz or .zst",
        fix="name a file, a folder or a glob of the dataset that holds such files",
    )


def _shortened(names: Iterable[str]) -> str:
    """Return the first names, separated by commas, and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - _MAX_SHOWN} more" if len(listed) > _MAX_SHOWN else ""
    return ", ".join(listed[:_MAX_SHOWN]) + more


PREFIX = "hf://"
DOWNLOAD_BYTES = 64 * GIB  # larger datasets are read by ranges
_CARD = "README.md"
_MAX_CARD_BYTES = 4 * MIB
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SPECIAL = re.compile(r"(refs/(?:convert/[\w.-]+|pr/\d+))(?:/(.*))?")
_OTHER_KINDS = {
    "models": "hf://models/ is a model",
    "spaces": "hf://spaces/ is a space, which is an application",
    "buckets": "hf://buckets/ is a storage bucket",
}
_RIGHT_FORM = "use hf://datasets/owner/name, optionally with @revision and /path after it"


@dataclass(frozen=True)
class Address:
    """The parts of a dataset's address. `path` is "" for the complete dataset."""

    name: str
    revision: str | None
    path: str


@dataclass(frozen=True)
class Dataset:
    """Files of a dataset, sorted. `revision` is their commit.

    They are on this machine (`files`), or they are read by ranges (`remote`).
    """

    files: tuple[Path, ...]
    revision: str
    remote: tuple[str, ...] = ()


Enough = Callable[[Sequence[Path]], bool]


def dataset(place: str, enough: Enough | None = None) -> Dataset:
    """Select the data files of a dataset, fetch those that are not in the cache, and return them.

    More than DOWNLOAD_BYTES are not fetched, unless all files are in the cache: they are read by ranges. A download is
    kept for other runs, and a range is not.

    Args:
        place: An address such as `hf://datasets/owner/name[@revision][/path]`.
        enough: Returns whether the first files, given by their paths, suffice. By default, all files are needed.

    Raises:
        UserError: The address is invalid, the selection is ambiguous, the hub or the disk fails, or the machine is
            offline and files are missing.
    """
    address = parse(place)
    repository = Repository(address.name, "dataset")
    place = place.rstrip("/")
    if is_offline():
        return _cached(repository, address, place, enough)
    if is_commit(address.revision):
        try:
            return _cached(repository, address, place, enough)
        except UserError:
            pass  # ask the hub, which fetches what is missing or reports a more precise error
    listing = repository.listing(address.revision)
    card: Path | None = None
    if _has_card(address, listing):
        card = repository.download(listing.commit, [_CARD]) / _CARD
    chosen = choose(listing.sizes, address.path, _front_matter(card), place)
    is_large = enough is None and sum(listing.sizes[name] for name in chosen) > DOWNLOAD_BYTES
    if is_large and not all(repository.is_cached(listing.commit, name) for name in chosen):
        remote = tuple(f"datasets/{address.name}@{listing.commit}/{name}" for name in chosen)
        return Dataset((), listing.commit, remote)
    groups = [chosen] if enough is None else [[name] for name in chosen]
    fetched: list[Path] = []
    for names in groups:
        repository.check_disk_space(listing.commit, {name: listing.sizes[name] for name in names})
        folder = repository.download(address.revision, names)
        if folder.name != listing.commit:  # the branch has moved since it was listed
            folder = repository.download(listing.commit, names)
        _save_listing(folder, listing)
        fetched += [folder / name for name in names]
        if enough is not None and enough(fetched):
            break
    return _local_dataset(folder, chosen, address, enough)


def parse(place: str) -> Address:
    """Return the parts of `hf://datasets/owner/name[@revision][/path]`. Raise UserError if it is invalid.

    A slash in a revision is written as %2F, as in the hub client. `refs/convert/parquet` and `refs/pr/1` may also
    be written with slashes.
    """
    kind, _, rest = place.removeprefix(PREFIX).partition("/")
    if kind != "datasets":
        right = f"hf://datasets/{place.removeprefix(PREFIX)}" if kind not in _OTHER_KINDS else ""
        raise UserError(
            "E-DATA-036",
            f"data.path: {place} is not a dataset's address",
            why=_OTHER_KINDS.get(kind, "hf:// without datasets/ is a model"),
            fix=f"data.path={right}" if right else _RIGHT_FORM,
        )
    owner, _, after_owner = rest.strip("/").partition("/")
    first, slash, path = after_owner.partition("/")
    last, at, revision = first.partition("@")
    name = f"{owner}/{last}"
    if at:
        revision_and_path = revision + slash + path
        if special := _SPECIAL.fullmatch(revision_and_path):
            revision, path = special[1], special[2] or ""
        revision = unquote(revision)
    if not _NAME.fullmatch(name) or ".." in name or "--" in name or (at and not revision):
        raise UserError(
            "E-DATA-037",
            f"data.path: {place} is not a dataset's address",
            why=f"the name is {name!r}" + (" and the revision is empty" if at and not revision else ""),
            fix=_RIGHT_FORM,
        )
    return Address(name, revision or None, path.strip("/"))


def _cached(repository: Repository, address: Address, place: str, enough: Enough | None) -> Dataset:
    """Return the dataset from the cache only, with the list of files that was stored when it was fetched."""
    folder = repository.download(address.revision, [], local=True)
    listing = _load_listing(folder)
    if listing is None:
        raise UserError(
            "E-DATA-038",
            f"{address.name} was not fetched by forerun, so files may be missing",
            why=f"HF_HUB_OFFLINE is set, and forerun has no list of the files in {folder}",
            fix=f"run the same command once with HF_HUB_OFFLINE unset, or name the folder: data.path={folder}",
        )
    card: Path | None = None
    if _has_card(address, listing):
        _require_local(folder, [_CARD], address)
        card = folder / _CARD
    chosen = choose(listing.sizes, address.path, _front_matter(card), place)
    return _local_dataset(folder, chosen, address, enough)


def _has_card(address: Address, listing: Listing) -> bool:
    """Return whether to read the card: it exists, is not too large, and the user selects no path in the dataset."""
    return not address.path and 0 < listing.sizes.get(_CARD, 0) <= _MAX_CARD_BYTES


def _local_dataset(folder: Path, names: list[str], address: Address, enough: Enough | None) -> Dataset:
    """Return the dataset with the selected files in `folder`. Raise UserError if a file is missing."""
    if enough is None:
        _require_local(folder, names, address)
        return Dataset(tuple(folder / name for name in names), folder.name)
    found: list[Path] = []
    for name in names:
        _require_local(folder, [name], address)
        found.append(folder / name)
        if enough(found):
            break
    return Dataset(tuple(found), folder.name)


def _require_local(folder: Path, names: list[str], address: Address) -> None:
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(
            "E-DATA-039",
            f"{address.name} is not complete on this machine",
            why=f"{absent[0]} is missing in {folder}; {len(absent)} of {len(names)} files are missing",
            fix="run the same command with HF_HUB_OFFLINE unset, which fetches the missing files",
        )


def _front_matter(card: Path | None) -> dict[str, object] | None:
    return None if card is None else front_matter(card.read_text(encoding="utf-8", errors="replace"))


def _list_file(folder: Path) -> Path:
    return folder.parent.parent / "forerun" / f"{folder.name}.json"


def _save_listing(folder: Path, listing: Listing) -> None:
    """Store the list of files of a commit for offline use."""
    file = _list_file(folder)
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        atomic_write(file, json.dumps({"files": listing.sizes}))


def _load_listing(folder: Path) -> Listing | None:
    """Return the stored list of files of a commit, or None."""
    try:
        return Listing(folder.name, json.loads(_list_file(folder).read_text("utf-8"))["files"])
    except (OSError, ValueError, KeyError):
        return None
