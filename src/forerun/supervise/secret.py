"""The secret that the supervisors of one run share: where it comes from, and how it is proven without being said."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import MutableMapping
from pathlib import Path

from forerun.errors import UserError
from forerun.files import open_regular

VARIABLE = "FORERUN_SECRET"
LEAST_BYTES = 16


class Secret:
    """Bytes that never print."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(***)"

    def mac(self, *parts: bytes) -> bytes:
        """Of the parts, each with its length before it, so that no two lists of parts read the same."""
        return mac(self._value, *parts)


def mac(key: bytes, *parts: bytes) -> bytes:
    whole = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(key, whole, hashlib.sha256)


def same(first: bytes, second: bytes) -> bool:
    return hmac.compare_digest(first, second)


def new_secret() -> Secret:
    """For a run on one host, whose supervisor speaks to nobody else."""
    return Secret(secrets.token_bytes(32))


def read_secret(file: Path | None, environment: MutableMapping[str, str] = os.environ) -> Secret:
    """From a file that only its owner may read, or else from the environment, where it is then removed."""
    given = environment.pop(VARIABLE, None)
    if file is not None:
        return _checked(_read(file), str(file))
    if given is None:
        raise UserError(
            "several hosts need a secret of this run",
            why=f"neither a secret file nor {VARIABLE} was given: anybody on the network could end the run",
            fix="on one host: (umask 077; head -c 32 /dev/urandom | base64 > secret), then copy it to the others",
        )
    return _checked(given.strip().encode(), VARIABLE)


def _read(file: Path) -> bytes:
    try:
        with open_regular(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UserError(
                    f"{file} can be read by others",
                    why=f"its mode is {stat.S_IMODE(mode):04o}, and it is the secret of this run",
                    fix=f"chmod 600 {file}",
                )
            return opened.read(4096).strip()
    except OSError as error:
        raise UserError(
            f"the secret of this run cannot be read: {file}",
            why=str(error.strerror),
            fix="copy the same file to every host, mode 0600",
        ) from error


def _checked(value: bytes, where: str) -> Secret:
    if len(value) < LEAST_BYTES:
        raise UserError(
            f"the secret in {where} is too short",
            why=f"{len(value)} characters; at least {LEAST_BYTES} are needed",
            fix="make a new one: (umask 077; head -c 32 /dev/urandom | base64 > secret)",
        )
    return Secret(value)
