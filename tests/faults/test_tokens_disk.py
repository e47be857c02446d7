"""A full disk under the token store: a tmpfs, which root may mount."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import fill_disk, small_disk

from forerun.cli.main import main
from forerun.exit_codes import STORAGE_FAILED

DISK_BYTES = 256 << 10
JOB = """\
model: {layers: 1, embed: 32, heads: 2}
data: {path: text.jsonl, store: disk/store, workers: 1}
sequence: 128
batch: 8
steps: 1
device: cpu
"""


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder, DISK_BYTES):
        monkeypatch.chdir(tmp_path)
        yield folder


def test_the_exit_code_lets_a_supervisor_try_again(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker process writes the tokens; its error keeps the exit code. With space, the same command works."""
    Path("text.jsonl").write_text("".join(json.dumps({"text": f"{n} " + "x" * 400}) + "\n" for n in range(600)))
    Path("job.yaml").write_text(JOB)
    assert main(["data", "job.yaml"]) == STORAGE_FAILED
    assert "disk/store" in capsys.readouterr().err
    assert not list(disk.rglob("*.tokens"))
    subprocess.run(["mount", "-o", f"remount,size={64 * DISK_BYTES}", str(disk)], check=True)
    assert main(["data", "job.yaml"]) == 0


def test_a_disk_that_is_full_before_the_first_worker(disk: Path) -> None:
    Path("text.jsonl").write_text('{"text": "short"}\n' * 60)
    Path("job.yaml").write_text(JOB)
    ballast = fill_disk(disk)
    assert main(["data", "job.yaml"]) == STORAGE_FAILED
    ballast.unlink()
    assert main(["data", "job.yaml"]) == 0
