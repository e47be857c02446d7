"""Upload of an exported folder to a model repository of the hub, through the hub's own client.

The client's settings apply (HF_TOKEN or `hf auth login`, HF_ENDPOINT). It stores large files by their content, so a
second upload after an interruption skips files that the hub has already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import UserError, first_line
from forerun.hub.errors import is_network, status_of
from forerun.hub.names import is_repository_text
from forerun.hub.repository import guard_client, is_offline
from forerun.reporter import SILENT, Reporter

OWN_FILES = (".gitattributes",)  # the hub writes it when it creates a repository
_BLOCK_BYTES = 1 << 20
_WRONG_ANSWERS = (ValueError, LookupError, TypeError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Upload:
    """A folder that is on the hub.

    Attributes:
      url: the page of the repository.
      commit: the commit that contains the files.
      is_private: whether only the owner can see it.
    """

    url: str
    commit: str
    is_private: bool


def require_upload(name: str) -> None:
    """Raise a UserError if an upload to the repository `name` cannot start. Sends nothing."""
    import huggingface_hub

    if not is_repository_text(name):
        raise UserError(
            "E-HUB-050",
            f"--push {name}: this is not the name of a repository",
            why="a repository has an owner and a name, with letters, digits, dots, hyphens and underscores",
            fix="write --push owner/name, where owner is your user or organization on the hub",
        )
    if is_offline() or huggingface_hub.get_token() is None:
        cause = "HF_HUB_OFFLINE is set" if is_offline() else "no token was found"
        raise UserError(
            "E-HUB-051",
            f"nothing can be uploaded to {name}",
            why=f"{cause}, and an upload needs a token that may write",
            fix="unset HF_HUB_OFFLINE, and set HF_TOKEN=... before the command or run `hf auth login`",
        )


def push_folder(
    folder: Path,
    name: str,
    *,
    public: bool = False,
    overwrite: bool = False,
    message: str = "Upload a model exported by forerun",
    reporter: Reporter = SILENT,
) -> Upload:
    """Upload all files of a folder in one commit, and return its address.

    Args:
        folder: The exported folder.
        name: The repository, `owner/name`. It is created if it does not exist.
        public: Whether everyone may see the repository. By default, a new repository is private.
        overwrite: Whether a repository with other files is replaced. Its history keeps them.
        message: The message of the commit.
        reporter: receives a line for each part of the work.

    Raises:
        UserError: The token may not write, the repository has other content or is public, or the network failed.
    """
    require_upload(name)
    import huggingface_hub

    guard_client()
    client = huggingface_hub.HfApi()
    try:
        before = _existing(client, name)
        if before is not None:
            if not (before.private or public):
                raise UserError(
                    "E-HUB-052",
                    f"the repository {name} is public",
                    why="everyone could download the model, and --public was not given",
                    fix="add --public, or name another repository",
                )
            others = [] if overwrite else list(_other_files(before, folder))
            if others:
                raise UserError(
                    "E-HUB-053",
                    f"the repository {name} has other content",
                    why=f"{_shortened(others)}: not in the exported folder, or different there",
                    fix="name another repository, or add --overwrite to replace its files; its history keeps the old "
                    "ones",
                )
        else:
            reporter.info(f"creating the {'public' if public else 'private'} repository {name}")
            client.create_repo(name, private=not public, exist_ok=True)
        reporter.info(f"uploading {folder} to {name}")
        commit = client.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=message,
            parent_commit=None if before is None else before.sha,
            delete_patterns="*" if overwrite else None,
        )
        _require_complete(client, name, folder)
    except Exception as error:
        again = f"forerun export {folder} --push {name}{' --public' * public}{' --overwrite' * overwrite}"
        raise _to_user_error(error, name, again) from error
    is_private = not public if before is None else bool(before.private)
    return Upload(f"{client.endpoint}/{name}", commit.oid, is_private)


def _existing(client: Any, name: str) -> Any:
    """Return what the hub knows about the repository, or None if it does not exist."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return client.model_info(name, files_metadata=True)
    except RepositoryNotFoundError as error:
        if status_of(error) == 401:  # the hub does not accept the token
            raise
        return None


def _require_complete(client: Any, name: str, folder: Path) -> None:
    """Raise an error unless the repository lists exactly the files of the folder, with their contents.

    The client omits the files that the hub tells it to ignore, and still reports success.
    """
    after = _existing(client, name)
    listed = set() if after is None else {file.rfilename for file in after.siblings or ()}
    missing = sorted({path.relative_to(folder).as_posix() for path in _files(folder)} - listed)
    differences = [*missing, *([] if after is None else _other_files(after, folder))]
    if differences:
        raise UserError(
            "E-HUB-063",
            f"the repository {name} does not have what was uploaded",
            why=f"missing or different on the hub: {_shortened(differences)}",
            fix=f"do not use the repository; look at its page, and upload again with forerun export {folder} "
            f"--push {name} --overwrite",
        )


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files that the client uploads: all but its own cache and the data of Git."""
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and ".git" not in parts and parts[:2] != (".cache", "huggingface"):
            yield path


def _other_files(before: Any, folder: Path) -> Iterator[str]:
    """Yield the files of the repository that the folder does not have, or has with other content."""
    for file in before.siblings or ():
        path = folder / file.rfilename
        if file.rfilename in OWN_FILES:
            continue
        # The hub names the files, so a name may lead out of the folder: such a file is not one of the export.
        is_inside = path.resolve().is_relative_to(folder.resolve())
        if not is_inside or not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
            yield file.rfilename
        elif file.lfs is not None:
            if _digest(path, hashlib.sha256()) != file.lfs.sha256:
                yield file.rfilename
        elif file.blob_id and _digest(path, hashlib.sha1(f"blob {path.stat().st_size}\0".encode())) != file.blob_id:
            yield file.rfilename


def _digest(path: Path, digest: Any) -> str:
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return str(digest.hexdigest())


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _to_user_error(error: Exception, name: str, again: str) -> Exception:
    """Return the error to raise instead of `error`, or `error` itself if it is not from the hub or the network.

    `again` is the command that uploads the same folder.
    """
    if isinstance(error, UserError):
        return error
    causes = list(_causes(error))
    status = next((found for cause in causes if (found := status_of(cause))), 0)
    if status in (401, 403):
        return UserError(
            "E-HUB-054",
            f"the hub does not let you write to {name}",
            why=f"it answered {status}: the token is wrong, has expired, or may not write to this owner's repositories",
            fix="create a token with write access, then HF_TOKEN=... before the command, or `hf auth login`",
        )
    if status in (409, 412):
        return UserError(
            "E-HUB-055",
            f"the repository {name} changed during the upload",
            why=f"the hub answered {status}: another upload or commit came first",
            fix=f"wait until the other upload is complete, then run `{again}`",
        )
    if status or any(is_network(cause) for cause in causes):
        reason = f"the hub answered {status}" if status else first_line(causes[-1])
        return UserError(
            "E-HUB-056",
            f"the upload to {name} was interrupted",
            why=reason,
            fix=f"run `{again}`: files that are complete on the hub are not sent again",
        )
    # The client reads the hub's JSON without checks, so a wrong answer ends in one of Python's own errors.
    wrong = next((cause for cause in causes if isinstance(cause, _WRONG_ANSWERS)), None)
    if wrong is not None:
        return UserError(
            "E-HUB-064",
            f"the hub's answer about {name} cannot be used",
            why=f"{type(wrong).__name__}: {first_line(wrong)}",
            fix=f"check HF_ENDPOINT, which must be the address of a hub; then run `{again}`",
        )
    return error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes. The client wraps errors of its upload threads."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
