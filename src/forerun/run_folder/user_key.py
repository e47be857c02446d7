"""Secret keys of the user. forerun signs files with them that it must be able to trust later.

A key authenticates a file only if those who can write the file cannot write the key. The caller therefore stores the
key outside of the folder that it protects.
"""

from __future__ import annotations

import hmac
import os
import secrets
from hashlib import sha256
from pathlib import Path

KEY_BYTES = 32


def make_private(folder: Path) -> None:
    """Create `folder` if it is missing, and restrict access to the user."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def user_key(file: Path) -> bytes:
    """Return the key in `file`. Create a random key in a private folder if there is none.

    A key that other users can read, or that another user owns, is replaced. Two processes that start at the same time
    get the same key.

    Raises:
      OSError: the key cannot be read or created.
    """
    make_private(file.parent)
    try:
        key, found = file.read_bytes(), file.stat()
        if len(key) == KEY_BYTES and not found.st_mode & 0o077 and found.st_uid == os.geteuid():
            return key
        file.unlink()
    except FileNotFoundError:
        pass
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(secrets.token_bytes(KEY_BYTES))
    try:
        os.link(part, file)
    except FileExistsError:
        pass
    finally:
        part.unlink()
    return file.read_bytes()


def signature(key: bytes, name: str, content: bytes) -> bytes:
    """Return the HMAC of a name and a content. It cannot be computed without the key."""
    mac = hmac.new(key, f"{name}\n".encode(), sha256)
    mac.update(content)
    return mac.digest()
