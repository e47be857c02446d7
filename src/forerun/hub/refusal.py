"""What the hub's client could not do, told as a user's mistake with its fix."""

from __future__ import annotations

import errno
from typing import Literal

from forerun.errors import StorageError, UserError

RepositoryKind = Literal["model", "dataset"]

_LOG_IN = "HF_TOKEN=... before the command, or `hf auth login`"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)


def refusal(
    error: Exception, name: str, revision: str | None, *, downloading: bool, kind: RepositoryKind = "model"
) -> Exception:
    """The error to raise in place of the client's; one that is not of the hub, disk or network comes back as it is."""
    if isinstance(error, UserError):
        return error
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return _gated(name, _status(error), kind)
    if isinstance(error, errors.RepositoryNotFoundError):
        return _not_found(name, _status(error), kind)
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"{name} has no revision {revision!r}",
            why=f"the {kind} exists, but not that branch, tag or commit: see {_page(name, kind)}",
            fix="name a branch, a tag or a whole commit hash that exists, or leave the revision out",
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return _not_here(error, name, revision)
    if isinstance(error, errors.HfHubHTTPError):
        return _answered(error, name, kind)
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return StorageError(
            f"the disk became full while {name} was fetched",
            why=str(error),
            fix="make room (`hf cache ls` shows what the cache holds) or set HF_HOME to a larger disk; "
            "then the same command goes on, whole files are kept",
        )
    if isinstance(error, OSError) and error.errno in _NO_ACCESS:
        return UserError(
            f"the cache cannot be written for {name}", why=str(error), fix="mend its permissions, or set HF_HOME"
        )
    if _is_network(error):
        return _interrupted(error, name) if downloading else _unreachable(error, name)
    return error


def _not_found(name: str, status: int, kind: RepositoryKind) -> UserError:
    folder = kind == "model"
    return UserError(
        f"the hub has no {kind} {name} for you",
        why=f"it answered {status}: the {kind} does not exist, or it is private"
        + ("; no such folder is here" if folder else ""),
        fix="check the name letter by letter"
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
    return UserError(f"{name} is gated: its authors ask you to accept terms first", why=why, fix=fix)


def _not_here(error: Exception, name: str, revision: str | None) -> UserError:
    from huggingface_hub import constants

    if error.__cause__ is not None and not constants.HF_HUB_OFFLINE:
        return _unreachable(error.__cause__, name)
    at = f" at revision {revision!r}" if revision else ""
    missing = "some of its files are" if type(error).__name__ == "IncompleteSnapshotError" else "it is"
    return UserError(
        f"{name}{at} is not on this machine",
        why=f"HF_HUB_OFFLINE is set, and {missing} not in the cache {constants.HF_HUB_CACHE}",
        fix="run the same command once with HF_HUB_OFFLINE unset, or set HF_HOME to where it was fetched",
    )


def _answered(error: Exception, name: str, kind: RepositoryKind) -> UserError:
    status = _status(error)
    if status in (401, 403):
        return UserError(
            f"the hub does not let you read {name}",
            why=f"it answered {status}: the token is wrong, has expired, or may not read this {kind}",
            fix=f"make a token that may read it, then {_LOG_IN}",
        )
    return UserError(
        f"the hub could not serve {name}",
        why=f"it answered {status or _first_line(error)}",
        fix="wait a little and run the same command; whole files are kept. "
        "With HF_HUB_OFFLINE=1 a copy from an earlier run is used",
    )


def _unreachable(error: BaseException, name: str) -> UserError:
    from huggingface_hub import constants

    return UserError(
        f"the hub cannot be reached for {name}",
        why=f"{constants.ENDPOINT}: {_first_line(error)}",
        fix="check the network, proxy and HF_ENDPOINT; with HF_HUB_OFFLINE=1 a copy from an earlier run is used",
    )


def _interrupted(error: Exception, name: str) -> UserError:
    return UserError(
        f"the download of {name} was interrupted",
        why=_first_line(error),
        fix="run the same command: files that are whole are kept, the others are fetched again",
    )


def _is_network(error: Exception) -> bool:
    """Errors of the transport under the client, whichever package it is, and files that came too short."""
    package = type(error).__module__.partition(".")[0]
    broken = package.startswith(("httpx", "httpcore", "requests", "urllib3", "hf_xet"))
    return broken or isinstance(error, ConnectionError | TimeoutError) or "Consistency check" in str(error)


def _status(error: Exception) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _page(name: str, kind: RepositoryKind) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
