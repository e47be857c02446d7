"""The tracker of Weights & Biases. It runs in a separate process (`forerun.track.backends.client_process`)."""

from __future__ import annotations

import configparser
import html
import importlib
import json
import netrc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from forerun.errors import UserError
from forerun.track.tracker import Row, TrackedRun

FINISH_SECONDS = 45.0  # less than the time that the end of a run waits
STORE_SECONDS = 30.0  # until wandb must have written rows to its file
POLL_SECONDS = 0.25  # wandb writes its file every second
KILLED = 255  # wandb's own exit code for a run that was interrupted

SETTINGS = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_save_requirements": False,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_transaction_log_flush_interval": 1.0,
    "finish_timeout": FINISH_SECONDS,
    "finish_timeout_raises": True,
}
WANDB_SERVER = "https://api.wandb.ai"
WITHOUT_KEY = ("offline", "dryrun", "disabled")
BLOCK_BYTES = 32 * 1024  # of a file that wandb writes without a server
FILE_HEADER_BYTES = 7
TAIL_BLOCKS = 8
RECORD_HEADER_BYTES = 7  # checksum 4, length 2, type 1
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class WandbClient:
    """A run in a project of Weights & Biases, or in the folder `wandb` of the run if WANDB_MODE is offline.

    The token of the run is the identifier, so a resumed run continues the same run.
    """

    def __init__(self, project: str, entity: str | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports of crashes to the maker of wandb
        self._wandb: Any = importlib.import_module("wandb")
        self._project, self._entity = project, entity
        self._run: Any = None
        self._folder, self._token = Path(), ""

    def begin(self, run: TrackedRun) -> int | None:
        """Create or resume the run, and return its last step, or 0."""
        known = self._wandb.Settings.model_fields  # older releases lack some
        settings = self._wandb.Settings(**{name: value for name, value in SETTINGS.items() if name in known})
        self._folder, self._token = run.folder / "wandb", run.token
        offline = last_step(self._folder, self._token)
        self._run = self._wandb.init(
            project=self._project,
            entity=self._entity,
            id=run.token,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.job),
            resume="allow",
            settings=settings,
        )
        if self._run.disabled:
            return None
        return offline if self._run.offline else max(int(self._run.starting_step) - 1, 0)

    def send(self, rows: Sequence[Row]) -> None:
        """Send rows. Without a server, return when wandb's file has them: a kill loses what is only in its memory."""
        for row in rows:
            values = {key: value for key, value in row.items() if key not in ("step", "unix_seconds", "samples")}
            values = {key: value for key, value in values.items() if value is not None}
            if row.get("samples"):
                # A wandb.Table would create an artifact with its own version for each step.
                values["samples"] = self._wandb.Html(page_of(row["samples"]), inject=False)
            # With `commit`, the client sends the row immediately instead of after the next one.
            self._run.log({**values, "_timestamp": row["unix_seconds"]}, step=row["step"], commit=True)
        if self._run.offline and not self._run.disabled:
            self._wait_for(rows[-1]["step"])

    def _wait_for(self, step: int) -> None:
        """Wait until the offline file has a step."""
        deadline = time.monotonic() + STORE_SECONDS
        while last_step(self._folder, self._token) < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"wandb's file does not have step {step} after {STORE_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def end(self, finished: bool) -> None:
        """Wait until the server has all rows. Raise TimeoutError if it does not confirm them in time."""
        if self._run is not None:
            self._run.finish(exit_code=0 if finished else KILLED)


def page_of(samples: Sequence[Mapping[str, str]]) -> str:
    """Return an HTML table of prompts and texts."""
    cells = [(html.escape(sample["prompt"]), html.escape(sample["text"])) for sample in samples]
    rows = "".join(f"<tr><td><pre>{prompt}</pre></td><td><pre>{text}</pre></td></tr>" for prompt, text in cells)
    style = "pre{white-space:pre-wrap}td,th{text-align:left;vertical-align:top;padding:4px 12px}"
    return f"<style>{style}</style><table><tr><th>prompt</th><th>text</th></tr>{rows}</table>"


# ---- The files in which wandb records a run without a server: `wandb/offline-run-*/run-*.wandb` ----
#
# wandb has no function that returns the last step of such a file. The format is that of the logs of LevelDB: blocks of
# 32 KiB, and records with a checksum, a length and a type. Each record contains a protocol buffer `Record`.


def last_step(folder: Path, token: str) -> int:
    """Return the last step of the run `token` in the offline files of `folder`, or 0."""
    return max((_last_step(path) for path in folder.glob(f"offline-run-*-{token}/run-*.wandb")), default=0)


def _last_step(path: Path) -> int:
    """Return the last step of a file, or 0. Only the end of a long file is read, unless it has no step."""
    with path.open("rb") as file:
        blocks = max(os.fstat(file.fileno()).st_size // BLOCK_BYTES - TAIL_BLOCKS, 0)
        file.seek(blocks * BLOCK_BYTES)
        found = max(_steps(file.read(), 0 if blocks else FILE_HEADER_BYTES), default=0)
        if found or not blocks:
            return found
        file.seek(0)
        return max(_steps(file.read(), FILE_HEADER_BYTES), default=0)


def _steps(data: bytes, start: int) -> Iterator[int]:
    """Yield the steps of a log. A record that a kill truncated is omitted."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for content in _records(data, start):
        record = messages.Record()
        with suppress(Exception):  # the exception for a damaged message depends on the release of protobuf
            record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                if item.key == "_step" or list(item.nested_key) == ["_step"]:
                    yield int(json.loads(item.value_json))


def _records(data: bytes, at: int) -> Iterator[bytes]:
    """Yield the complete records of a log from the position `at`. The end of an earlier record is omitted."""
    parts: bytes | None = None
    while at + RECORD_HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < RECORD_HEADER_BYTES:  # the rest of a block is padding
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        start = at + RECORD_HEADER_BYTES
        at = start + length
        if kind not in (FULL, FIRST, MIDDLE, LAST) or at > len(data):
            return
        if kind in (FULL, FIRST):
            parts = b""
        if parts is None:
            continue
        parts += data[start:at]
        if kind in (FULL, LAST):
            yield parts
            parts = None


# ---- The key of the user ----


def require_login(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if the client of Weights & Biases would ask for a key: a run has no terminal to answer in.

    forerun never reads the key. It only checks that the client finds one.
    """
    if environment.get("WANDB_MODE", "online") in WITHOUT_KEY:
        return
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    settings = _settings(environment)
    if settings.get("mode") in WITHOUT_KEY or settings.get("api_key"):
        return
    server = environment.get("WANDB_BASE_URL") or settings.get("base_url") or WANDB_SERVER
    host = urlsplit(server).hostname or server
    if _is_in_netrc(host, environment):
        return
    raise UserError(
        "E-TRACK-008",
        "track.to: wandb has no API key",
        why=f"WANDB_API_KEY is not set, and the netrc file has no entry for {host}",
        fix="set WANDB_API_KEY or run `wandb login`; WANDB_MODE=offline records the run without a server",
    )


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of wandb's settings files, which `wandb login --host` and `wandb offline` write."""
    home = Path(environment.get("WANDB_CONFIG_DIR") or Path("~/.config/wandb").expanduser())
    read = configparser.ConfigParser(interpolation=None)
    try:
        read.read([home / "settings", Path(environment.get("WANDB_DIR") or ".") / "wandb" / "settings"])
        return dict(read["default"]) if "default" in read else {}
    except (configparser.Error, OSError, UnicodeDecodeError):
        return {}


def _is_in_netrc(host: str, environment: Mapping[str, str]) -> bool:
    named = environment.get("NETRC")
    paths = [Path(named).expanduser()] if named else [Path(f"~/{name}").expanduser() for name in (".netrc", "_netrc")]
    for path in paths:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
    return False
