"""Text for people: what is hidden, what is made visible, and that nothing else changes."""

from __future__ import annotations

import io
import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from forerun.console import SafeConsole, SafeLive
from forerun.errors import UserError
from forerun.safe_text import SafeStream, clean, printable, raw_stream, redact, safe_streams
from forerun.track.display.terminal import TerminalDisplay

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b8m\x1b[8m\u202egood\r"
CONTROLS = {chr(n) for n in range(0x110000) if unicodedata.category(chr(n)) == "Cc"} - {"\n", "\t"}
OVERRIDES = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_control_character_becomes_visible() -> None:
    """Unicode's own list of control characters is the oracle."""
    for sign in CONTROLS | OVERRIDES | set(map(chr, (0xD800, 0xDFFF))):
        shown = printable(f"a{sign}b")
        assert shown.isprintable(), ascii(sign)
        assert shown[0] + shown[-1] == "ab"
    assert printable("Zeile\n\tzwei: é 漢 🙂 \u200f") == "Zeile\n\tzwei: é 漢 🙂 \u200f"


@given(st.text())
def test_printable_changes_nothing_the_second_time(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert not set(shown) & (CONTROLS | OVERRIDES)
    shown.encode()


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_means_the_same_after_it_was_made_printable(value: object) -> None:
    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:SECRET@host/a?b", "http://***@host/a?***"),
        ("https://SECRET@host", "https://***@host"),
        ("http://me:SEC/RET#1@host/a", "http://***@host/a"),
        ("http://me:SEC@RET@host/a", "http://***@host/a"),
        ("http:/me:SECRET@host/a?SECRET", "http:/***@host/a?***"),
        ("chain::s3://id:SECRET@bucket/a", "chain::s3://***@bucket/a"),
        ("404, url='https://host/a?x=SECRET&y=SECRET', not found", "404, url='https://host/a?***', not found"),
        ("HTTPS://host/a#token=SECRET.", "HTTPS://host/a#***."),
        ("abfs://host/a?sig=SECRET and gs://bucket/b", "abfs://host/a?*** and gs://bucket/b"),
    ],
)
def test_secrets_of_urls_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "hf://datasets/owner/name@main/train-?.parquet",
        "gs://bucket/part-?.jsonl",
        "abfs://container@account.net/file",
        "sftp://me@host/file",
        "https://host:8080/@scope/file.jsonl",
        "http://[::1]:80/a@b",
        "see https://docs.example/page#section.",
        "job.yaml:3 sets data.path?",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("text", ["a" * 10**6, "://" * 10**6, "http://h/?" + "." * 10**6, "http://a:b" + ":@" * 10**6])
def test_a_long_text_takes_linear_time(text: str) -> None:
    """A quadratic pattern would need an hour and end at the time limit of the test."""
    clean(text)


def test_the_parts_of_an_error_are_clean() -> None:
    error = UserError("E-DATA-999", HOSTILE, why=f"why {HOSTILE}", fix="curl http://a:SECRET@host")
    for text in (error.what, error.why, error.fix, str(error), repr(error)):
        assert not set(text) & CONTROLS
        assert "SECRET" not in text


def test_streams_filter_what_is_printed_and_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with safe_streams():
        for piece in HOSTILE:  # as chat writes: a sequence must not pass because it comes in pieces
            print(piece, end="", flush=True)
        sys.stderr.writelines([HOSTILE, " http://a:SECRET@host\n"])
        print("\r\x1b[K3/4 http://host/?SECRET", file=sys.stderr)
        assert raw_stream(sys.stdout) is before[0]
    assert (sys.stdout, sys.stderr) == before
    out, err = capsys.readouterr()
    assert not set(out) & (CONTROLS | OVERRIDES)
    assert "SECRET" not in err
    first, second = err.splitlines()[0], err.split("\n")[1]
    assert not set(first) & (CONTROLS | OVERRIDES)
    assert second.startswith("\r\x1b[K3/4")


def test_a_console_draws_its_own_colours_only() -> None:
    screen = Screen()
    console = SafeConsole(file=SafeStream(screen), color_system="standard", force_terminal=True, width=200)  # type: ignore[arg-type]
    console.print(Text(f"{HOSTILE}[red]x[/nothing]", style="bold"))
    assert screen.getvalue().count("\x1b") == 2
    assert screen.getvalue().startswith("\x1b[1m\\x1b]0;owned")
    assert "[red]x[/nothing]\x1b[0m\n" in screen.getvalue()


def test_the_live_display_is_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, screen)
    before = sys.stdout
    with TerminalDisplay(screen, clock=lambda: 0.0) as display:
        with display.phase(HOSTILE, "http://host/?SECRET") as phase:
            phase.detail = f"{HOSTILE} http://host/?SECRET"
            print(HOSTILE)  # a library that prints while the display is drawn
            print(f"{HOSTILE} http://host/?a=SECRET", file=sys.stderr)
        display.info(HOSTILE)
        display.warn(f"http://a:SECRET@host {HOSTILE}")
        assert isinstance(display._live, SafeLive)
    assert sys.stdout is before
    text = screen.getvalue()
    assert "\\x1b]0;owned\\x07" in text
    for sequence in ("\x1b]", "\x07", "\x9b", "\x1b[2J", "\x1b[8m", "\u202e", "SECRET"):
        assert sequence not in text, ascii(sequence)
