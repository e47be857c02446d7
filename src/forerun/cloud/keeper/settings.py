"""The settings of a keeper, in its `agent.json`. They contain no secret."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class KeeperSettings:
    """What a keeper must know.

    Attributes:
      folder: the bucket folder of the run.
      resource: the name of the keeper itself, which it deletes at the end.
      overrides: the keys of the job whose local files are at another path on the keeper.
      since: when the user started or resumed the run, in the cloud's time.
    """

    folder: str
    project: str | None
    resource: str
    zone: str
    overrides: tuple[str, ...] = ()
    since: float = 0.0

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"


def read_settings(file: Path) -> KeeperSettings:
    values = json.loads(file.read_text("utf-8"))
    return KeeperSettings(**{**values, "overrides": tuple(values["overrides"])})
