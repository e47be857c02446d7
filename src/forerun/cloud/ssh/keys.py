"""The ssh key pair of a run, in the user's configuration folder, and the secrets that are derived from it."""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from forerun.errors import UserError


def key_folder() -> Path:
    """Return the folder with the keys of all runs of this user."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "forerun" / "cloud-keys"


def identity_of(folder: str) -> Path:
    """Return the private key file of the run with this bucket folder. Create the key pair if it does not exist.

    The public key is beside it, with the suffix `.pub`. Two processes that create it at the same time get one key.

    Raises:
      UserError: OpenSSH is not installed.
    """
    place = key_folder() / hashlib.sha256(folder.encode()).hexdigest()[:20]
    file = place / "id_ed25519"
    if not file.exists():
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=place.parent, prefix=".new-"))
        try:
            _create(made / "id_ed25519")
            # A folder cannot replace one with files in it, so the first process wins.
            os.rename(made, place)
        except OSError:
            if not file.exists():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return file


def store_identity(folder: str, private_key: bytes) -> Path:
    """Store the private key of a run that another machine created. A key that exists is kept."""
    place = key_folder() / hashlib.sha256(folder.encode()).hexdigest()[:20]
    file = place / "id_ed25519"
    if not file.exists():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = place / ".id_ed25519.part"
        part.touch(mode=0o600)
        part.write_bytes(private_key)
        command = ["ssh-keygen", "-y", "-f", str(part)]
        public = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True).stdout
        (place / "id_ed25519.pub").write_bytes(public)
        part.rename(file)
    return file


def public_key(identity: Path) -> str:
    """Return the public key of a private key file, as `ssh-ed25519 AAAA...`."""
    return " ".join(identity.with_name(identity.name + ".pub").read_text("utf-8").split()[:2])


def attempt_secret(folder: str, attempt: int) -> str:
    """Return the secret of the supervisors of an attempt.

    It is a function of the run's private key and the attempt. A controller that is started again therefore sends the
    same secret to the hosts that it had not reached before.
    """
    key = identity_of(folder).read_bytes()
    return hmac.digest(key, f"supervisor#{folder}#{attempt}".encode(), hashlib.sha256).hex()


def require_openssh() -> None:
    """Raise UserError if the programs of OpenSSH are not installed."""
    missing = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    if missing:
        raise UserError(
            "E-CLOUD-035",
            f"{' and '.join(missing)} was not found",
            why="forerun reaches the machines with the system's OpenSSH",
            fix="install OpenSSH, for example: apt install openssh-client",
        )


def _create(file: Path) -> None:
    require_openssh()
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "forerun", "-f", str(file)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
