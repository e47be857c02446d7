"""Local paths that a job names."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import UserError, did_you_mean
from forerun.storage.address import Address

TEXT_SUFFIXES = (".txt", ".md", "")


def local_path(place: str, *, key: str, wanted: str = "file or folder") -> Path:
    """Return `place` as an existing local path.

    Args:
      place: the path as the user wrote it.
      key: the key of the job that names it, for errors.
      wanted: what the key may name, for errors.

    Raises:
      UserError: the path does not exist, or it is the address of a server.
    """
    address = Address.of(place)
    if address.is_remote:
        scheme = address.protocol or ""
        raise UserError(
            "E-DATA-076",
            f"{key}: {scheme}:// addresses are not supported yet",
            why=f"{place} is not a local path",
            fix=f"copy it to this machine and set {key} to the copy" + _copy_command(scheme, place),
        )
    path = Path(place).expanduser()
    if not path.exists():
        near = did_you_mean(path.name, _names(path.parent))
        raise UserError(
            "E-DATA-077",
            f"{key}: {place} does not exist",
            why=f"looked for {path.absolute()}",
            fix=f"did you mean {path.parent / near}?" if near else f"set {key} to an existing {wanted}",
        )
    return path


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def _copy_command(scheme: str, place: str) -> str:
    """Return the end of a sentence: a command that copies `place`, or nothing for an unknown scheme."""
    return {
        "gs": f": gcloud storage cp -r {place} data/",
        "s3": f": aws s3 cp --recursive {place} data/",
        "http": f": curl -LO {place}",
        "https": f": curl -LO {place}",
    }.get(scheme, "")
