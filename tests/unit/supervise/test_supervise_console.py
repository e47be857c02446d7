"""What a supervisor prints: host names and the output of workers are text, never control sequences."""

from __future__ import annotations

import pytest

from forerun.supervise.console import Console


def test_hosts_and_workers_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("supervisor")
    console.info("lost host 1 (\x1b]0;owned\x07) at http://me:SECRET@host")
    worker = "é \x1b[2J \u202e http://host/?token=SECRET\n".encode() + b"\xff\n"
    for byte in worker[:4], worker[4:]:
        console.write(byte)
    console.close()
    shown = capsys.readouterr().err
    assert shown == (
        "supervisor: lost host 1 (\\x1b]0;owned\\x07) at http://***@host\né \\x1b[2J \\u202e http://host/?***\n\\xff\n"
    )
