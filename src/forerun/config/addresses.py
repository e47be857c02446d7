"""Check for credentials in the URLs of a job. A job is stored, shared and published, so it must not contain secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl

from forerun.errors import JobValueError, UserError
from forerun.safe_text import user_info

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
