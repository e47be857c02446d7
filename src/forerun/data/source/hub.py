"""Datasets on the Hugging Face hub. Their files are fetched into the cache of the hub client, or read by ranges.

    hf://datasets/owner/name[@revision][/file, folder or glob]

Only the selected files and the card of the dataset (README.md) are fetched. Scripts of a dataset are never run. The
list of all files is stored next to the cached ones, so that an incomplete dataset is detected offline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from forerun.data.source import splits
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.hub.repository import Listing, Repository, is_commit, is_offline
from forerun.units import GIB, MIB

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
    """Files of a dataset, sorted. `revision` is their commit, `chosen` describes the selection.

    They are on this machine (`files`), or they are read by ranges (`remote`).
    """

    files: tuple[Path, ...]
    revision: str
    chosen: str
    remote: tuple[str, ...] = ()


Enough = Callable[[Sequence[Path]], bool]


def dataset_files(place: str, enough: Enough | None = None) -> list[Path] | list[str]:
    """Return the data files that `place` names, sorted: local paths, or paths of `RangeFiles` as text.

    The arguments are those of `dataset`.
    """
    found = dataset(place, enough)
    return list(found.remote) if found.remote else list(found.files)


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
    listing, choice = _selection(repository, address, place)
    large = enough is None and _size_bytes(listing, choice) > DOWNLOAD_BYTES
    if large and not all(repository.is_cached(listing.commit, name) for name in choice.files):
        remote = tuple(f"datasets/{address.name}@{listing.commit}/{name}" for name in sorted(choice.files))
        return Dataset((), listing.commit, f"{address.name}@{listing.commit[:7]}, {choice.words}", remote)
    groups = [sorted(choice.files)] if enough is None else [[name] for name in sorted(choice.files)]
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
    return _local_dataset(folder, choice, address, enough)


def _selection(repository: Repository, address: Address, place: str) -> tuple[Listing, splits.Choice]:
    """Return the files of the dataset on the hub, and those that the address selects."""
    listing = repository.listing(address.revision)
    card: Path | None = None
    if _has_card(address, listing):
        card = repository.download(listing.commit, [_CARD]) / _CARD
    return listing, splits.choose(listing.sizes, address.path, _front_matter(card), place)


def _size_bytes(listing: Listing, choice: splits.Choice) -> int:
    return sum(listing.sizes[name] for name in choice.files)


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
    choice = splits.choose(listing.sizes, address.path, _front_matter(card), place)
    return _local_dataset(folder, choice, address, enough)


def _has_card(address: Address, listing: Listing) -> bool:
    """Return whether to read the card: it exists, is not too large, and the user selects no path in the dataset."""
    return not address.path and 0 < listing.sizes.get(_CARD, 0) <= _MAX_CARD_BYTES


def _local_dataset(folder: Path, choice: splits.Choice, address: Address, enough: Enough | None) -> Dataset:
    """Return the dataset with the selected files in `folder`. Raise UserError if a file is missing."""
    words = f"{address.name}@{folder.name[:7]}, {choice.words}"
    names = sorted(choice.files)
    if enough is None:
        _require_local(folder, names, address)
        return Dataset(tuple(folder / name for name in names), folder.name, words)
    found: list[Path] = []
    for name in names:
        _require_local(folder, [name], address)
        found.append(folder / name)
        if enough(found):
            break
    return Dataset(tuple(found), folder.name, words)


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
    return None if card is None else splits.front_matter(card.read_text(encoding="utf-8", errors="replace"))


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
