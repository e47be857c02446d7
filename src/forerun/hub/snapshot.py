"""The files of a model on this machine: a local folder, or a hub repository that is downloaded if needed.

The hub client has its own settings for cache, token, endpoint and offline mode (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). forerun downloads only safetensors, JSON and tokenizer files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.hub.documents import INDEX_NAME, MAX_CONFIG_BYTES, read_json
from forerun.hub.files import roots_of
from forerun.hub.names import folder_path, is_folder, kind_of
from forerun.hub.repository import Repository, is_commit, is_offline
from forerun.hub.safetensors import (
    PICKLE_ENDINGS,
    SINGLE_NAME,
    Weights,
    no_weights,
    open_weights,
    tensor_names,
    weight_files,
)

CONFIG_NAME = "config.json"
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
# Settings for images, video and audio, which an export of a multimodal model keeps.
PROCESSOR_NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
SMALL_NAMES = (CONFIG_NAME, "generation_config.json", INDEX_NAME, *TOKENIZER_NAMES, *PROCESSOR_NAMES)


@dataclass(frozen=True)
class Snapshot:
    """The files of a model in a folder."""

    name: str
    folder: Path
    revision: str | None  # the commit; None for a local folder

    def file(self, name: str) -> Path | None:
        """Return the path of a file, or None if the model does not have it."""
        path = self.folder / name
        return path if path.exists() else None

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        return tuple(path for name in TOKENIZER_NAMES if (path := self.file(name)) is not None)

    @property
    def processor_files(self) -> tuple[Path, ...]:
        return tuple(path for name in PROCESSOR_NAMES if (path := self.file(name)) is not None)

    def tensor_names(self) -> frozenset[str] | None:
        """Return the names of the tensors, or None if neither the index nor the weights are on this machine yet."""
        return tensor_names(self.folder)

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the object in a JSON file, or None if the model does not have the file."""
        path = self.file(name)
        return None if path is None else read_json(path)

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return read_json(self.folder / CONFIG_NAME, limit_bytes=MAX_CONFIG_BYTES)

    def open_weights(self) -> Weights:
        return open_weights(self.folder, roots_of(self.folder))


def snapshot(name: str, revision: str | None = None, *, weights: bool = True) -> Snapshot:
    """Return the files of a model, downloaded if needed.

    Args:
        name: A folder, or `owner/name` on the hub.
        revision: A branch, tag or commit of a hub repository, or None for its default branch.
        weights: Whether the weights must be present too.

    Raises:
        UserError: The model does not exist, is incomplete, has no safetensors, or cannot be downloaded.
    """
    if is_folder(name):
        return _local(name, revision, weights)
    if (Path(name) / "job.yaml").is_file():
        raise UserError(
            "E-HUB-029",
            f"{name} is a run, not a model",
            why="the folder of a run has checkpoints and a job.yaml, but no config.json and no safetensors",
            fix=f"run `forerun export {name} --to my-model`, then name ./my-model",
        )
    if kind_of(name) != "repository":
        raise UserError(
            "E-HUB-030",
            f"model {name!r} has no files",
            why="it is neither a hub name (owner/name) nor the path of a folder",
            fix=f"write owner/{name}, or ./{name} for a folder",
        )
    if revision is not None and is_commit(revision):
        try:
            return _offline(name, revision, weights)  # a commit never changes
        except UserError:
            pass  # it is not complete in the cache
    return _offline(name, revision, weights) if is_offline() else _fetched(name, revision, weights)


def tokenizer_snapshot(name: str, revision: str | None = None) -> Snapshot:
    """Return the tokenizer files and the chat template of a hub repository, downloaded if needed.

    No other file is downloaded. The repository does not need a config.json or weights.

    Args:
        name: `owner/name` on the hub.
        revision: A branch, tag or commit, or None for the default branch.

    Raises:
        UserError: The repository or the revision does not exist, or the hub cannot be reached.
    """
    repository, names = Repository(name), list(TOKENIZER_NAMES)
    if is_commit(revision) and not is_offline():
        try:
            cached = repository.download(revision, names, local=True)
            if (cached / "tokenizer.json").exists():
                return Snapshot(name, cached, cached.name)
        except UserError:
            pass  # ask the hub
    if is_offline():
        folder = repository.download(revision, names, local=True)
    else:
        listing = repository.listing(revision)
        found = [file for file in names if file in listing.sizes]
        repository.check_disk_space(listing.commit, {file: listing.sizes[file] for file in found})
        folder = repository.download(listing.commit, found)
    return Snapshot(name, folder, folder.name)


def _local(name: str, revision: str | None, weights: bool) -> Snapshot:
    folder = folder_path(name)
    if revision is not None:
        raise UserError(
            "E-HUB-031",
            f"model {name}: a folder has no revision",
            why=f"revision {revision!r} was given",
            fix="remove the revision, or name a model of the hub",
        )
    if not folder.is_dir():
        raise UserError(
            "E-HUB-032", f"model {name}: the folder does not exist", why=f"looked for {folder}", fix="correct the path"
        )
    return _complete(Snapshot(name, folder, None), weights)


def _fetched(name: str, revision: str | None, weights: bool) -> Snapshot:
    """Download a model and return its snapshot.

    The list of files is checked first, so that an unusable model or a full disk is reported before the download.
    """
    repository = Repository(name)
    listing = repository.listing(revision)
    sizes = {file: size for file, size in listing.sizes.items() if "/" not in file}
    _check_listing(name, list(sizes), weights)
    small = [file for file in SMALL_NAMES if file in sizes]
    repository.check_disk_space(listing.commit, {file: sizes[file] for file in small})
    folder = repository.download(revision, small)
    if weights:
        files = weight_files(folder) if INDEX_NAME in sizes else [SINGLE_NAME]
        missing = [file for file in files if file not in sizes]
        if missing:
            raise UserError(
                "E-HUB-033",
                f"{name} lacks weights that its index names",
                why=f"{missing[0]} is not among its files; {len(missing)} of {len(files)} are missing",
                fix="use another revision, or report it to the authors of the model",
            )
        repository.check_disk_space(listing.commit, {file: sizes[file] for file in files})
        folder = repository.download(folder.name, files)
    return _complete(Snapshot(name, folder, folder.name), weights)


def _offline(name: str, revision: str | None, weights: bool) -> Snapshot:
    folder = Repository(name).download(revision, list(SMALL_NAMES), local=True)
    return _complete(Snapshot(name, folder, folder.name), weights)


def _complete(found: Snapshot, weights: bool) -> Snapshot:
    """Return `found`. Raise a UserError if it has no config.json, or if weights are wanted and missing."""
    if not found.folder.joinpath(CONFIG_NAME).is_file():
        raise UserError(
            "E-HUB-034",
            f"model {found.name} has no {CONFIG_NAME}",
            why=f"looked in {found.folder}",
            fix="name the folder or repository that has config.json beside the weights",
        )
    names = [entry.name for entry in found.folder.iterdir()]
    if found.revision is None:
        _check_listing(str(found.folder), names, weights)
    if not weights:
        return found
    fetched_without = found.revision is not None and not {SINGLE_NAME, INDEX_NAME} & set(names)
    files = [SINGLE_NAME] if fetched_without else weight_files(found.folder)
    absent = [file for file in files if not (found.folder / file).exists()]
    if absent:
        raise UserError(
            "E-HUB-035",
            f"model {found.name} is not complete on this machine",
            why=f"{absent[0]} is missing in {found.folder}",
            fix="copy the missing files there, or download the checkpoint again"
            if found.revision is None
            else "run the same command with HF_HUB_OFFLINE unset: it downloads the missing files",
        )
    return found


def _check_listing(where: str, names: list[str], weights: bool) -> None:
    """Raise a UserError for a model that has only pickle files, or no weights although weights are wanted."""
    if SINGLE_NAME in names or INDEX_NAME in names:
        return
    if weights or any(name.endswith(PICKLE_ENDINGS) for name in names):
        raise no_weights(where, names)
