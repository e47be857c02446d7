r"""Text that is safe to show: `redact` hides credentials in URLs, `printable` makes control characters visible.

`safe_streams` replaces stdout and stderr for a command, so a `print` anywhere cannot send a control sequence to the
terminal. Only code that draws (forerun.console, the table of `check`) writes to the underlying stream, which
`raw_stream` returns. That code filters the text between its own colours. A filter on the underlying stream is not
possible, because it cannot distinguish the colours of forerun from escape sequences in a user's file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from typing import Self

HIDDEN = "***"
# Matches only the part after the scheme. A pattern that begins with a scheme needs quadratic time for a long word.
_ADDRESS = re.compile(r":(//?)([^\s\"<>`]+)")
_AUTHORITY_END = re.compile(r"[/?#]")
_PUNCTUATION = "'),.;:]}!"  # after a URL in a sentence
_WEB = ("http", "https")
# Controls but not \t and \n, bidirectional overrides, lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# The start of a progress line on stderr, as forerun and tqdm write it. The text after it is filtered.
_PROGRESS = re.compile(r"\r(?:\x1b\[K)?|\n*(?:\x1b\[A)+\Z")


def printable(text: str) -> str:
    r"""Return `text` with control characters, bidirectional overrides and lone surrogates as escapes such as \x1b.

    Line ends and tabs stay. Applying the function twice changes nothing.
    """
    return _UNSAFE.sub(lambda found: _escaped(ord(found[0])), text)


def _escaped(code: int) -> str:
    # JSON has no \x escape, but escapes everything below 0x20 itself: the \u form keeps printed JSON valid.
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


def redact(text: str) -> str:
    """Return `text` with the passwords and queries of all URLs in it replaced by ***."""
    return _ADDRESS.sub(_redacted, text) if ":/" in text else text


def clean(text: str) -> str:
    """Return `text` redacted and printable, for messages."""
    return printable(redact(text))


def redacted_tree(value: Any) -> Any:
    """Return plain data with every text in it redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {name: redacted_tree(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redacted_tree(inner) for inner in value)
    return value


def user_info(scheme: str, rest: str) -> str:
    """Return the user info of `scheme://rest` that is secret, with its @, or "".

    `user@host` of sftp and `container@account` of abfs are not secret. For http and https, a name without a password is
    secret too, because it is sent as a credential.
    """
    end = _AUTHORITY_END.search(rest)
    authority = rest[: end.start()] if end else rest
    info, at, _ = authority.rpartition("@")
    if at:
        return info + at if ":" in info or scheme.lower() in _WEB else ""
    # A password that contains a / or # ends the authority early. The part after the colon is then not a port.
    host, colon, port = authority.partition(":")
    if end and colon and port and not port.isdigit() and not host.startswith("[") and "@" in rest:
        return rest[: rest.rindex("@") + 1]
    return ""


def _redacted(found: re.Match[str]) -> str:
    before = found.string[max(0, found.start() - 8) : found.start()]
    scheme = re.split(r"[^A-Za-z0-9+.-]", before)[-1].lower()
    if found[1] == "/" and scheme not in _WEB:  # pathlib makes http:/host of http://host
        return found[0]
    url = found[2].rstrip(_PUNCTUATION)
    after = found[2][len(url) :]
    if info := user_info(scheme, url):
        url = f"{HIDDEN}@{url[len(info) :]}"
    path, mark, query = url.partition("?")
    # A ? is a wildcard in gs://bucket/part-?.jsonl.
    if query and (scheme in _WEB or "=" in query):
        url = path + mark + HIDDEN
    path, mark, fragment = url.partition("#")
    if "=" in fragment:
        url = path + mark + HIDDEN
    return f":{found[1]}{url}{after}"


class SafeStream:
    """A text stream that filters the text that is written to it.

    With `messages`, URLs are redacted too, and progress lines may move the cursor.
    """

    def __init__(self, stream: TextIO, *, messages: bool = False) -> None:
        self.raw = stream
        self._messages = messages

    def write(self, text: str) -> int:
        start = _PROGRESS.match(text) if self._messages else None
        head = start[0] if start else ""
        filtered: Callable[[str], str] = clean if self._messages else printable
        self.raw.write(head + filtered(text[len(head) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.raw.flush()


def raw_stream(stream: TextIO) -> TextIO:
    """Return the underlying stream of a SafeStream, for code that draws and filters its own text."""
    return stream.raw if isinstance(stream, SafeStream) else stream


def safe_stream(stream: TextIO, *, messages: bool = False) -> TextIO:
    """Return `stream` with a filter. A SafeStream, or None for a closed stream, is returned unchanged."""
    return (
        stream
        if stream is None or isinstance(stream, SafeStream)
        else cast(TextIO, SafeStream(stream, messages=messages))
    )


@contextmanager
def safe_streams() -> Iterator[None]:
    """Filter stdout and stderr while the block runs. stderr is filtered as messages."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = safe_stream(sys.stdout), safe_stream(sys.stderr, messages=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
