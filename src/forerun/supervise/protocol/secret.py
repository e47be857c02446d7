"""The shared secret of a run's supervisors, and the message authentication codes (MACs) that prove it."""

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
    """A secret that `repr` and logs do not show."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(***)"

    def mac(self, *parts: bytes) -> bytes:
        """Return the MAC of `parts`, with this secret as the key."""
        return mac(self._value, *parts)


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of `parts`."""
    # Each part follows its length, so two different lists of parts never give the same bytes.
    content = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(key, content, hashlib.sha256)


def same(first: bytes, second: bytes) -> bool:
    """Return whether two MACs are equal, in a time that does not depend on their content."""
    return hmac.compare_digest(first, second)


def new_secret() -> Secret:
    """Return a random secret, for a run on one host."""
    return Secret(secrets.token_bytes(32))


def read_secret(file: Path | None, environment: MutableMapping[str, str] = os.environ) -> Secret:
    """Return the secret of a run on several hosts.

    Args:
        file: A file that only its owner can access, or None to read the variable FORERUN_SECRET.
        environment: The variable is removed from it, so that child processes do not inherit the secret.

    Raises:
        UserError: No secret was given, it is too short, or other users can access the file.
    """
    given = environment.pop(VARIABLE, None)
    if file is not None:
        return _checked(_read(file), str(file))
    if given is None:
        raise UserError(
            "E-HOSTS-024",
            "a run on several hosts needs a secret",
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
                    "E-HOSTS-025",
                    f"{file} can be read by others",
                    why=f"its mode is {stat.S_IMODE(mode):04o}, and it is the secret of this run",
                    fix=f"chmod 600 {file}",
                )
            return opened.read(4096).strip()
    except OSError as error:
        raise UserError(
            "E-HOSTS-026",
            f"the secret of this run cannot be read: {file}",
            why=str(error.strerror),
            fix="copy the same file to every host, mode 0600",
        ) from error


def _checked(value: bytes, where: str) -> Secret:
    if len(value) < LEAST_BYTES:
        raise UserError(
            "E-HOSTS-027",
            f"the secret in {where} is too short",
            why=f"{len(value)} characters; at least {LEAST_BYTES} are needed",
            fix="make a new one: (umask 077; head -c 32 /dev/urandom | base64 > secret)",
        )
    return Secret(value)
