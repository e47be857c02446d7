"""Conversion of errors of the hub client to user errors with a fix."""

from __future__ import annotations

import errno
from typing import Literal

from forerun.errors import StorageError, UserError, first_line

RepositoryKind = Literal["model", "dataset"]

_LOG_IN = "HF_TOKEN=... before the command, or `hf auth login`"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)


def to_user_error(
    error: Exception, name: str, revision: str | None, *, downloading: bool, kind: RepositoryKind = "model"
) -> Exception:
    """Return the error to raise instead of `error`, or `error` itself if it is not from the hub, disk or network.

    Args:
        error: The exception of the client.
        name: The repository, `owner/name`.
        revision: The requested revision, or None.
        downloading: Whether files were being downloaded when it occurred.
        kind: The kind of repository.
    """
    if isinstance(error, UserError):
        return error
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return _gated(name, status_of(error), kind)
    if isinstance(error, errors.RepositoryNotFoundError):
        return _not_found(name, status_of(error), kind)
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            "E-HUB-018",
            f"{name} has no revision {revision!r}",
            why=f"the {kind} exists, but not that branch, tag or commit: see {_page(name, kind)}",
            fix="name an existing branch, tag or full commit hash, or remove the revision",
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return _not_here(error, name, revision)
    if isinstance(error, errors.HfHubHTTPError):
        return _answered(error, name, kind)
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return StorageError(
            "E-HUB-019",
            f"the disk became full during the download of {name}",
            why=str(error),
            fix="free disk space (`hf cache ls` lists the cache) or set HF_HOME to a larger disk; "
            "then run the same command again: complete files are kept",
        )
    if isinstance(error, OSError) and error.errno in _NO_ACCESS:
        return UserError(
            "E-HUB-020",
            f"the cache cannot be written for {name}",
            why=str(error),
            fix="correct its permissions, or set HF_HOME",
        )
    if is_network(error):
        return _interrupted(error, name) if downloading else _unreachable(error, name)
    return error


def _not_found(name: str, status: int, kind: RepositoryKind) -> UserError:
    folder = kind == "model"
    return UserError(
        "E-HUB-021",
        f"the hub has no {kind} {name} that you can read",
        why=f"it answered {status}: the {kind} does not exist, or it is private"
        + ("; a local folder of that name does not exist either" if folder else ""),
        fix="check the spelling of the name"
        + (f" (a folder: ./{name})" if folder else "")
        + f"; if it is private, {_LOG_IN}",
    )


def _gated(name: str, status: int, kind: RepositoryKind) -> UserError:
    from huggingface_hub import get_token

    if status == 403:
        why = "the hub answered 403: your token is valid, but you have not been given access"
        fix = f"open {_page(name, kind)}, accept its terms, wait until access is granted, then run the same command"
    else:
        token = "the token is not accepted" if get_token() else "no token was sent"
        why = f"the hub answered {status}: {token}"
        fix = f"open {_page(name, kind)} and accept its terms, then {_LOG_IN}"
    return UserError("E-HUB-022", f"{name} is gated: you must accept its terms first", why=why, fix=fix)


def _not_here(error: Exception, name: str, revision: str | None) -> UserError:
    from huggingface_hub import constants

    if error.__cause__ is not None and not constants.HF_HUB_OFFLINE:
        return _unreachable(error.__cause__, name)
    at = f" at revision {revision!r}" if revision else ""
    missing = "some of its files are" if type(error).__name__ == "IncompleteSnapshotError" else "it is"
    return UserError(
        "E-HUB-023",
        f"{name}{at} is not on this machine",
        why=f"HF_HUB_OFFLINE is set, and {missing} not in the cache {constants.HF_HUB_CACHE}",
        fix="run the same command once with HF_HUB_OFFLINE unset, or set HF_HOME to a cache that has it",
    )


def _answered(error: Exception, name: str, kind: RepositoryKind) -> UserError:
    status = status_of(error)
    if status in (401, 403):
        return UserError(
            "E-HUB-024",
            f"the hub does not let you read {name}",
            why=f"it answered {status}: the token is wrong, has expired, or may not read this {kind}",
            fix=f"create a token that may read it, then {_LOG_IN}",
        )
    return UserError(
        "E-HUB-025",
        f"the hub could not serve {name}",
        why=f"it answered {status or first_line(error)}",
        fix="wait a little and run the same command again: complete files are kept. "
        "With HF_HUB_OFFLINE=1, forerun uses a copy from an earlier run",
    )


def _unreachable(error: BaseException, name: str) -> UserError:
    from huggingface_hub import constants

    return UserError(
        "E-HUB-026",
        f"the hub cannot be reached for {name}",
        why=f"{constants.ENDPOINT}: {first_line(error)}",
        fix="check the network, proxy and HF_ENDPOINT; with HF_HUB_OFFLINE=1, forerun uses a copy from an earlier run",
    )


def _interrupted(error: Exception, name: str) -> UserError:
    return UserError(
        "E-HUB-027",
        f"the download of {name} was interrupted",
        why=first_line(error),
        fix="run the same command again: complete files are kept, the others are downloaded again",
    )


def is_network(error: BaseException) -> bool:
    """Return whether an error comes from the network layer of the client, or from an incomplete download."""
    package = type(error).__module__.partition(".")[0]
    broken = package.startswith(("httpx", "httpcore", "requests", "urllib3", "hf_xet"))
    return broken or isinstance(error, ConnectionError | TimeoutError) or "Consistency check" in str(error)


def status_of(error: BaseException) -> int:
    """Return the HTTP status of the hub's response, or 0 if there was no response."""
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0))


def _page(name: str, kind: RepositoryKind) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
