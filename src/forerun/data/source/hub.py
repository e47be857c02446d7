"""A dataset of the hub by its name: its data files, fetched into the hub client's cache. Its scripts are never run.

    hf://datasets/owner/name[@revision][/file, folder or glob]

Only the chosen files and the dataset's card (README.md) are ever asked for. The list of files is kept beside the
cached ones, so that offline a part of a dataset is never taken for all of it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from forerun.data.source import splits
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.hub.repository import Listing, Repository, is_commit, is_offline
from forerun.units import MIB

PREFIX = "hf://"
_CARD = "README.md"
_MAX_CARD_BYTES = 4 * MIB
_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SPECIAL = re.compile(r"(refs/(?:convert/[\w.-]+|pr/\d+))(?:/(.*))?")
_RIGHT_FORM = "hf://datasets/owner/name, then @revision and /path if need be"


@dataclass(frozen=True)
class Address:
    """The parts of a place; `path` is "" for the whole dataset."""

    name: str
    revision: str | None
    path: str


@dataclass(frozen=True)
class Dataset:
    """Files on this machine, sorted; `revision` is the commit they are of, `chosen` says what they are."""

    files: tuple[Path, ...]
    revision: str
    chosen: str


def dataset_files(place: str) -> list[Path]:
    """The data files that `place` names, on this machine, sorted."""
    return list(dataset(place).files)


def dataset(place: str) -> Dataset:
    """The data files that `place` names, fetched if need be, and what was chosen."""
    address = parse(place)
    repository = Repository(address.name, "dataset")
    place = place.rstrip("/")
    if is_offline():
        return _cached(repository, address, place)
    if is_commit(address.revision):
        try:
            return _cached(repository, address, place)
        except UserError:
            pass  # the hub is asked, and whatever is wrong is told by what it says
    listing = repository.listing(address.revision)
    card: Path | None = None
    if _has_card(address, listing):
        card = repository.download(listing.commit, [_CARD]) / _CARD
    choice = splits.choose(listing.sizes, address.path, _front_matter(card), place)
    repository.check_room(listing.commit, {name: listing.sizes[name] for name in choice.files})
    folder = repository.download(address.revision, list(choice.files))
    if folder.name != listing.commit:  # the branch has moved since it was listed
        folder = repository.download(listing.commit, list(choice.files))
    _keep(folder, listing)
    return _found(folder, choice, address)


def parse(place: str) -> Address:
    """The parts of `hf://datasets/owner/name[@revision][/path]`; a revision's slashes are %2F, as the client has it.

    `refs/convert/parquet` and `refs/pr/1` may also be written as they are.
    """
    kind, _, rest = place.removeprefix(PREFIX).partition("/")
    if kind != "datasets":
        right = f"hf://datasets/{place.removeprefix(PREFIX)}" if kind not in ("models", "spaces", "buckets") else ""
        raise UserError(
            f"data.path: {place} is not a dataset's address",
            why="hf:// without datasets/ is a model",
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
            f"data.path: {place} is not a dataset's address",
            why=f"the name is {name!r}" + (" and the revision is empty" if at and not revision else ""),
            fix=_RIGHT_FORM,
        )
    return Address(name, revision or None, path.strip("/"))


def _cached(repository: Repository, address: Address, place: str) -> Dataset:
    """From the cache alone, by the list of files that was kept when they were fetched."""
    folder = repository.download(address.revision, [], local=True)
    listing = _kept(folder)
    if listing is None:
        raise UserError(
            f"{address.name} was not fetched by forerun: whether all of it is here cannot be told",
            why=f"HF_HUB_OFFLINE is set, and no list of its files is beside {folder}",
            fix=f"run the same command once with HF_HUB_OFFLINE unset, or name the folder: data.path={folder}",
        )
    card: Path | None = None
    if _has_card(address, listing):
        _check_here(folder, [_CARD], address)
        card = folder / _CARD
    return _found(folder, splits.choose(listing.sizes, address.path, _front_matter(card), place), address)


def _has_card(address: Address, listing: Listing) -> bool:
    """Whether the card has a say: a path inside the dataset is the user's own choice."""
    return not address.path and 0 < listing.sizes.get(_CARD, 0) <= _MAX_CARD_BYTES


def _found(folder: Path, choice: splits.Choice, address: Address) -> Dataset:
    _check_here(folder, list(choice.files), address)
    words = f"{address.name}@{folder.name[:7]}, {choice.words}"
    return Dataset(tuple(folder / name for name in sorted(choice.files)), folder.name, words)


def _check_here(folder: Path, names: list[str], address: Address) -> None:
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(
            f"{address.name} is not complete on this machine",
            why=f"{absent[0]} is missing in {folder}, {len(absent)} of {len(names)} files are",
            fix="run the same command with HF_HUB_OFFLINE unset: it fetches what is missing",
        )


def _front_matter(card: Path | None) -> dict[str, object] | None:
    return None if card is None else splits.front_matter(card.read_text(encoding="utf-8", errors="replace"))


def _list_file(folder: Path) -> Path:
    return folder.parent.parent / "forerun" / f"{folder.name}.json"


def _keep(folder: Path, listing: Listing) -> None:
    file = _list_file(folder)
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        atomic_write(file, json.dumps({"files": listing.sizes}))


def _kept(folder: Path) -> Listing | None:
    try:
        return Listing(folder.name, json.loads(_list_file(folder).read_text("utf-8"))["files"])
    except (OSError, ValueError, KeyError):
        return None
