"""The protocols that are allowed in the addresses of a job and of a command.

fsspec supports about 70 protocols. Some of them run code, or open other addresses that a file names (`reference://`,
`simplecache::`). The protocol of an address is therefore checked against a list before fsspec gets the address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import JobValueError, UserError
from forerun.safe_text import redact

DATA_PROTOCOLS = ("file", "gs", "gcs", "s3", "https", "hf")
CHECKPOINT_PROTOCOLS = ("gs",)
STORE_PROTOCOLS = ("gs", "s3")

# Keys of a job, and options of a command, that name a file or a folder on this machine.
LOCAL_KEYS = (
    "runs",
    "data.tokenizer",
    "data.chat_template",
    "distil.cache",
    "distil.teacher",
    "lora.start",
    "model.name",
)
_MODELS = ("distil.teacher", "model.name", "SOURCE", "--model")
LOCAL_OPTIONS = {
    "job": "JOB",
    "file": "FILE",
    "run": "RUN",
    "source": "SOURCE",
    "model": "--model",
    "batch": "--batch",
    "calibrate": "--calibrate",
    "chat_template": "--chat-template",
    "code": "--code",
    "html": "--html",
    "ledger": "--ledger",
    "out": "--out",
    "output": "--output",
    "prices": "--prices",
    "secret": "--secret",
    "to": "--to",
    "trace": "--trace",
}
_LOOPBACK = re.compile(r"http://(localhost|127(\.\d{1,3}){3})(:\d+)?(/|$)", re.ASCII)
_COPIES = {
    "gs": "gcloud storage cp -r",
    "gcs": "gcloud storage cp -r",
    "s3": "aws s3 cp --recursive",
    "https": "curl -LO",
}


_FOLDERS = {
    "checkpoint.folder": "name a folder of this machine, or gs://BUCKET/FOLDER",
    "data.store": "name a folder of this machine, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER",
}


def check_protocol(value: Any, key: str) -> None:
    """Raise JobValueError if the key of a job has an address that it does not allow. Nothing is opened."""
    if not isinstance(value, str) or "://" not in value:
        return
    if key in LOCAL_KEYS:
        raise _not_local(value, key)
    if key in ("data.path", "data.mixture.path"):
        _require(value, key, DATA_PROTOCOLS)
    elif key == "checkpoint.folder":
        _require(value, key, CHECKPOINT_PROTOCOLS)
    elif key == "data.store":
        _require(value, key, STORE_PROTOCOLS)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UserError if an option of a command has an address that it does not allow."""
    try:
        for name, option in LOCAL_OPTIONS.items():
            value = options.get(name)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and "://" in text:
                    raise _not_local(text, option)
        if isinstance(data := options.get("data"), str):
            require_data_address(data, "--data")
    except JobValueError as error:
        raise UserError(error.code, error.what, why=error.why, fix=error.fix) from None


def require_data_address(address: str, key: str = "data.path") -> None:
    """Raise UserError if fsspec must not open the address. A path of this machine is allowed."""
    if "://" not in address:
        return
    try:
        _require(address, key, DATA_PROTOCOLS)
    except JobValueError as error:
        raise UserError(error.code, error.what, why=error.why, fix=error.fix) from None


def _require(address: str, key: str, allowed: Sequence[str]) -> None:
    protocol = address.partition("://")[0]
    listed = ", ".join(f"{name}://" for name in allowed)
    if "::" in address:
        raise JobValueError(
            "E-JOB-005",
            f"{key}: chained addresses (::) are not allowed",
            why=f"{_shown(address)} would open another address; one of {listed} is allowed",
            fix=f"name the file itself, or copy it to this machine and set {key} to the copy",
        )
    if protocol == "http" and "https" in allowed:
        if _LOOPBACK.match(address):
            return
        raise JobValueError(
            "E-JOB-006",
            f"{key}: http:// is allowed for a server on this machine only",
            why=f"anyone on the network path to {_shown(address)} could change the data",
            fix="write https://, or fetch the file first, for example with curl, and name the copy",
        )
    if protocol not in allowed:
        raise JobValueError(
            "E-JOB-049",
            f"{key}: {_shown(protocol)}:// is not an allowed protocol",
            why=f"allowed are {listed} and paths of this machine",
            fix=_FOLDERS.get(key, f"copy it to this machine and set {key} to the copy"),
        )


def _not_local(address: str, key: str) -> JobValueError:
    protocol = _shown(address.partition("://")[0])
    command = _COPIES.get(protocol, "")
    fix = "copy it to this machine and name the copy" + (f": {command} {_shown(address)}" if command else "")
    fix += " ." if " cp " in command else ""
    if key == "runs":
        bucket = address if protocol == "gs" else "gs://BUCKET/FOLDER"
        fix = f"keep runs a local folder, and store the checkpoints in a bucket: checkpoint.folder={_shown(bucket)}"
    elif key in _MODELS:
        fix = "name a model of Hugging Face as owner/name, or copy the folder to this machine and name the copy"
    elif key in ("--html", "--out", "--output", "--to", "FILE"):
        fix = "write it to this machine, then copy it there" + (
            f": {command} NAME {_shown(address)}" if command else ""
        )
    elif key == "distil.cache":
        fix = f"name a folder of this machine, or of a file system that it has mounted: {key}=FOLDER"
    return JobValueError(
        "E-JOB-050",
        f"{key}: {protocol}:// is not supported here",
        why=f"{_shown(address)} is an address, and {key} is a file or a folder of this machine",
        fix=fix,
    )


def _shown(text: str) -> str:
    text = redact(text)
    return text if len(text) <= 80 else f"{text[:77]}..."
