"""Checks of the addresses in a job and in the arguments of a command: no credentials, and only allowed protocols.

A job is stored, shared and published, so it must not contain secrets.

fsspec supports about 70 protocols. Some of them run code, or open other addresses that a file names (`reference://`,
`simplecache::`). The protocol of an address is therefore checked against a list before fsspec gets the address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from forerun.errors import JobValueError, UserError
from forerun.safe_text import redact, user_info
from forerun.storage.address import BUCKET_PROTOCOLS, Address

# A URL, or a chain of them as fsspec writes it: simplecache::https://host/file
_URL = re.compile(r"\s*(?:[\w.+-]+::)*([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_CREDENTIAL = re.compile(
    r"token|secret|passw|passphrase|credential|signature|bearer|jwt|oauth"
    r"|api[-_]?key|access[-_]?key|access[-_]?id|key[-_]?pair[-_]?id|authorization|^x-amz-|^x-goog-"
    r"|^(?:auth|authkey|key|pass|pwd|sas|sig|sign)$",
    re.IGNORECASE,
)
_NOT_IN_URL = re.compile(r"[\s\"<>`\x00-\x1f\x7f-\x9f]")
_NETRC = "write them to ~/.netrc: machine HOST login USER password PASSWORD"
_ALTERNATIVES = {
    "http": _NETRC,
    "https": _NETRC,
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "run gcloud auth application-default login",
    "gcs": "run gcloud auth application-default login",
    "hf": "set HF_TOKEN, or run hf auth login",
    "track.url": "set MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN",
}
_SIGNED = (
    "fetch the file first, for example with curl, and name the copy; "
    "or put the token into a header: see docs/how-to/data.md, Private web servers"
)


def check_addresses(value: Any, key: str) -> None:
    """Raise JobValueError if a text in `value` is a URL that contains a credential. The message does not repeat it."""
    for text in _texts(value):
        found = _URL.match(text)
        if found:
            _check(found[1].lower(), found[2], key)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise UserError if an argument of a command is a URL that contains a credential."""
    for argument in arguments:
        option, equals, value = argument.partition("=")
        given = value if equals and option.startswith("-") else argument
        try:
            check_addresses(given, option if given is value else "command line")
        except JobValueError as error:
            raise UserError(
                "E-JOB-001",
                f"an address on the command line is rejected: {error.what}",
                why="other users see the arguments of a command",
                fix=f"change the address: {error.fix}",
            ) from None


def _check(scheme: str, rest: str, key: str) -> None:
    if user_info(scheme, rest):
        other = _ALTERNATIVES.get(key) or _ALTERNATIVES.get(scheme, "use the settings of the store's driver")
        raise JobValueError("E-JOB-022", f"{key}: a user name or password must not be in the URL of a job", fix=other)
    query = "".join(re.split(r"[?#]", rest, maxsplit=1)[1:])
    for name, _ in parse_qsl(re.sub(r"[?#;]", "&", query), keep_blank_values=True):
        if _CREDENTIAL.search(name):
            other = _ALTERNATIVES.get(key, _SIGNED)
            raise JobValueError(
                "E-JOB-023", f"{key}: the parameter '{name[:40]}' of the URL looks like a credential", fix=other
            )
    # Text after a blank would not be recognised as a part of the URL, so it would not be redacted in output.
    if _NOT_IN_URL.search(query):
        raise JobValueError(
            "E-JOB-024", f"{key}: the query of a URL cannot contain blanks or quotes", fix="write a blank as %20"
        )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from (*_texts(name), *_texts(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


# ---- Protocols ----

DATA_PROTOCOLS = ("file", "gs", "gcs", "s3", "https", "hf")

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
_FOLDERS = ("checkpoint.folder", "data.store")


def check_protocol(value: Any, key: str) -> None:
    """Raise JobValueError if the key of a job has an address that it does not allow. Nothing is opened."""
    if not isinstance(value, str) or not Address.of(value).is_remote:
        return
    if key in LOCAL_KEYS:
        raise _not_local(value, key)
    if key in ("data.path", "data.mixture.path"):
        _require(value, key, DATA_PROTOCOLS)
    elif key in _FOLDERS:
        _require(value, key, BUCKET_PROTOCOLS)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UserError if an option of a command has an address that it does not allow."""
    try:
        for name, option in LOCAL_OPTIONS.items():
            value = options.get(name)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and Address.of(text).is_remote:
                    raise _not_local(text, option)
        if isinstance(data := options.get("data"), str):
            require_data_address(data, "--data")
    except JobValueError as error:
        raise UserError(error.code, error.what, why=error.why, fix=error.fix) from None


def require_data_address(address: str, key: str = "data.path") -> None:
    """Raise UserError if fsspec must not open the address. A path of this machine is allowed."""
    if not Address.of(address).is_remote:
        return
    try:
        _require(address, key, DATA_PROTOCOLS)
    except JobValueError as error:
        raise UserError(error.code, error.what, why=error.why, fix=error.fix) from None


def _require(address: str, key: str, allowed: Sequence[str]) -> None:
    protocol = Address.of(address).protocol or ""
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
            fix="name a folder of this machine, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER"
            if key in _FOLDERS
            else f"copy it to this machine and set {key} to the copy",
        )


def _not_local(address: str, key: str) -> JobValueError:
    protocol = _shown(Address.of(address).protocol or "")
    command = _COPIES.get(protocol, "")
    fix = "copy it to this machine and name the copy" + (f": {command} {_shown(address)}" if command else "")
    fix += " ." if " cp " in command else ""
    if key == "runs":
        bucket = address if protocol in BUCKET_PROTOCOLS else "gs://BUCKET/FOLDER"
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
