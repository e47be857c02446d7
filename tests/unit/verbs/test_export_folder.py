"""Two exports into one target, in real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forerun.errors import UserError
from forerun.verbs.export.folder import part_folder, reserved, unfinished

HOLDER = """\
import sys
from pathlib import Path
from forerun.verbs.export.folder import reserved, unfinished
target = Path(sys.argv[1])
with reserved(target), unfinished(target) as part:
    (part / "config.json").write_text("other")
    print("writing", flush=True)
    sys.stdin.readline()
    part.rename(target)
"""


@contextmanager
def other_export(target: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        try:
            yield process
        finally:
            process.kill()


def write(target: Path, text: str) -> None:
    with reserved(target), unfinished(target) as part:
        assert list(part.iterdir()) == []
        (part / "config.json").write_text(text)
        part.rename(target)


def test_a_second_export_is_refused_and_the_first_one_ends(tmp_path: Path) -> None:
    target = tmp_path / "out/model"
    with other_export(target) as process:
        with pytest.raises(UserError) as error:
            write(target, "mine")
        assert error.value.code == "E-RUN-091"
        assert (part_folder(target) / "config.json").read_text() == "other"
        write(tmp_path / "out/another", "mine")
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    assert (target / "config.json").read_text() == "other"
    with pytest.raises(UserError) as error:
        write(target, "mine")
    assert error.value.code == "E-RUN-022"
    assert sorted(path.name for path in target.parent.iterdir()) == ["another", "model"]


def test_a_killed_export_leaves_no_lock(tmp_path: Path) -> None:
    with other_export(tmp_path / "model") as process:
        process.kill()
        process.wait()
        assert (part_folder(tmp_path / "model") / "config.json").exists()
        write(tmp_path / "model", "mine")
    assert (tmp_path / "model/config.json").read_text() == "mine"


def test_a_failed_export_removes_its_folder_only(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(ZeroDivisionError), reserved(target):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with reserved(target), unfinished(target) as part:
        part.rename(target)
        part.mkdir()  # that of an export which begins after the rename
    assert part.is_dir()


def test_a_link_in_place_of_the_unfinished_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("x")
    part_folder(tmp_path / "model").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=r"director|link"):
        write(tmp_path / "model", "mine")
    assert (tmp_path / "other/file").exists()
