"""The settings of a keeper, in its `agent.json`. They contain no secret."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.cloud.record.entries import CloudRun, Name, Time, Word
from forerun.cloud.record.read_entry import read_entry, require_undamaged, write_entry


@dataclass(frozen=True)
class KeeperSettings:
    """What a keeper must know.

    Attributes:
      run: what the user has agreed to. The keeper does not read it from the bucket, where it may be changed.
      resource: the name of the keeper itself, which it deletes at the end.
      overrides: the keys of the job whose local files are at another path on the keeper.
      since: when the user started or resumed the run, in the cloud's time.
    """

    run: CloudRun
    project: Word | None
    resource: Name
    zone: Name
    overrides: tuple[str, ...] = ()
    since: Time = 0.0

    def to_json(self) -> bytes:
        return write_entry(self)


def read_settings(file: Path) -> KeeperSettings:
    return require_undamaged(read_entry(KeeperSettings, str(file), file.read_bytes()))
