from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.main import main
from forerun.errors import UserError
from forerun.version import __version__

Capture = pytest.CaptureFixture[str]
Fake = Callable[[Callable[[argparse.Namespace], int]], None]


@pytest.fixture
def fake_train(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts a function in the place of `forerun train`."""

    def put(run: Callable[[argparse.Namespace], int]) -> None:
        def train(job: str, *overrides: str, **options: Any) -> int:
            return run(argparse.Namespace(job=job, overrides=list(overrides), **options))

        monkeypatch.setattr("forerun.cli.main.load_function", lambda path: train)

    return put


def test_help(capsys: Capture) -> None:
    for words in ([], ["--help"], ["-h"], ["--debug", "--help"]):
        assert main(words) == 0
        out, err = capsys.readouterr()
        assert err == ""
        for command in ("check", "plan", "train", "generate", "chat", "doctor", "hardware", "schema"):
            assert f"\n  {command} " in out
        assert out.split("examples:")[1].count("forerun ") == 3
        assert max(map(len, out.splitlines())) <= 100


def test_help_of_a_command(capsys: Capture) -> None:
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--on SLICES" in out
    assert "example: forerun plan" in out


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"forerun {__version__}\n"


@pytest.mark.parametrize(
    ("words", "code", "fix"),
    [
        (["trian", "job.yaml"], "E-COMMAND-016", "'forerun train'"),
        (["xyzzy"], "E-COMMAND-016", "forerun --help"),
        (["job.yaml"], "E-COMMAND-016", "'forerun train job.yaml'"),
        (["--verson"], "E-COMMAND-015", "'--version'"),
        (["plan", "job.yaml", "--jsn", "--on", "v5e-8"], "E-COMMAND-025", "'--json'"),
        (["train"], "E-COMMAND-023", "forerun train --help"),
        (
            ["cache", "job.yaml", "--host", "0/2"],
            "E-COMMAND-024",
            "forerun cache",
        ),
        (["train", "job.yaml", "--fres"], "E-COMMAND-025", "'--fresh'"),
        (["train", "job.yaml", "--steps", "10"], "E-COMMAND-025", "'steps=10'"),
        (["plan", "job.yaml", "--steps=10"], "E-COMMAND-025", "'steps=10'"),
        (["train", "--lr", "3e-4", "job.yaml"], "E-COMMAND-025", "'optimizer.lr=3e-4'"),
        (
            ["train", "job.yaml", "--learning-rate", "--fresh"],
            "E-COMMAND-025",
            "'optimizer.lr=...'",
        ),
        (
            ["check", "job.yaml", "--model", "owner/name"],
            "E-COMMAND-025",
            "'model=owner/name'",
        ),
        (["export", "runs/x", "--to", "y", "--steps", "10"], "E-COMMAND-025", "'--step'"),
        (["hardware", "chip"], "E-COMMAND-013", "'chips'"),
        (["doctor", "now"], "E-COMMAND-060", "forerun doctor --help"),
    ],
)
def test_wrong_words_are_the_users_mistake(words: list[str], code: str, fix: str, capsys: Capture) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, *_, last = err.splitlines()
    assert first.endswith(f"  [{code}]")
    assert last.startswith("  fix: ")
    assert fix in last


def test_a_command_gets_its_words_and_gives_the_exit_code(fake_train: Fake) -> None:
    seen: list[argparse.Namespace] = []
    fake_train(lambda args: seen.append(args) or 7)  # type: ignore[func-returns-value]
    assert main(["train", "--fresh", "job.yaml", "a.b=c"]) == 7
    assert (seen[0].job, seen[0].overrides, seen[0].fresh) == ("job.yaml", ["a.b=c"], True)


def test_a_users_mistake_has_no_traceback_unless_asked(fake_train: Fake, capsys: Capture) -> None:
    def run(args: argparse.Namespace) -> int:
        raise UserError("E-HARDWARE-999", "no TPU", why="none is attached", fix="set device=cpu")

    fake_train(run)
    assert main(["train", "job.yaml"]) == 2
    assert capsys.readouterr() == (
        "",
        "error: no TPU  [E-HARDWARE-999]\n  why: none is attached\n  fix: set device=cpu\n",
    )
    for words in (["--debug", "train", "job.yaml"], ["train", "job.yaml", "--debug"]):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert err.count("error: no TPU") == 1


def test_our_bug_says_so(fake_train: Fake, capsys: Capture) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ValueError("shapes differ")

    fake_train(run)
    assert main(["train", "my job.yaml"]) == 1
    assert capsys.readouterr().err == (
        "this is a bug in forerun: ValueError: shapes differ\n"
        "  for the traceback run: forerun --debug train 'my job.yaml'\n"
    )
    assert main(["train", "job.yaml", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("this is a bug in forerun: ValueError: shapes differ\n")


def test_ctrl_c(fake_train: Fake, capsys: Capture) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    fake_train(run)
    assert main(["train", "job.yaml"]) == 130
    assert capsys.readouterr().err == "\nstopped by Ctrl-C\n"


def test_a_broken_pipe_that_is_not_our_output_is_not_hidden(fake_train: Fake, capsys: Capture) -> None:
    def run(args: argparse.Namespace) -> int:
        raise BrokenPipeError("the data server left")

    fake_train(run)
    assert main(["train", "job.yaml"]) == 1
    assert "this is a bug" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_error(unbuffered: str) -> None:
    source = os.pathsep.join(path for path in sys.path if path)
    read, write = os.pipe()
    os.close(read)
    child = subprocess.run(
        [sys.executable, "-m", "forerun", "schema"],
        stdout=write,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(write)
    assert (child.returncode, child.stderr) == (141, b"")


def test_schema_is_written_where_it_is_asked(tmp_path: Path, capsys: Capture) -> None:
    import json

    from forerun.config.load import json_schema

    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    file = tmp_path / "job.schema.json"
    assert main(["schema", "--output", str(file)]) == 0
    assert json.loads(file.read_text()) == json_schema()
    assert f"# yaml-language-server: $schema={file}" in capsys.readouterr().out
    assert main(["schema", "--output", str(tmp_path / "no" / "x.json")]) == 2
    assert str(tmp_path / "no" / "x.json") in capsys.readouterr().err


def test_hardware_prints_one_table_or_all(capsys: Capture) -> None:
    from forerun.hardware import show

    assert main(["hardware", "chips"]) == 0
    assert capsys.readouterr().out == show.chips_table() + "\n"
    assert main(["hardware", "prices", "--zone", "us-central1-a"]) == 0
    assert capsys.readouterr().out == show.prices_table(None, "us-central1-a") + "\n"
    assert main(["hardware"]) == 0
    out = capsys.readouterr().out
    assert all(table in out for table in (show.chips_table(), show.slices_table(), show.prices_table(None, None)))


def test_doctor_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.doctor import checks

    monkeypatch.setattr(checks, "run", lambda smoke, overrides=(): 40 + smoke)
    assert main(["doctor"]) == 40
    assert main(["doctor", "--smoke"]) == 41


def test_trouble_with_a_disk_is_not_a_bug(fake_train: Fake, capsys: Capture) -> None:
    def full(_: argparse.Namespace) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/tale/metrics.jsonl")

    fake_train(full)
    assert main(["train", "job.yaml"]) == 74
    said = capsys.readouterr().err
    assert "runs/tale/metrics.jsonl" in said.splitlines()[0]
    assert said.splitlines()[0].endswith("[E-COMMAND-017]")
    assert "No space left" in said.splitlines()[1]
    assert "bug" not in said
