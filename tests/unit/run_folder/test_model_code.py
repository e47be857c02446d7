"""The code of a run: found where `train` found it, and never because a folder from elsewhere says so."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from recording_reporter import RecordingReporter

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.models.plugin import import_plugin, job_folder, use_job_folder
from forerun.reporter import SILENT
from forerun.run_folder.model_code import CODE, record_code, use_code_of
from forerun.run_folder.run_folder import RunFolder

JOB = Job.model_validate({"name": "own", "model": {"name": "own_net_probe:Net"}, "data": "text", "steps": 1})
MODULES = ("own_net_probe", "own_net_helper")


def forget() -> None:
    """What a new process knows of the job's folder: nothing."""
    use_job_folder(None)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job's folder and a run that was started from it, by a user with a home of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "own_net_probe.py").write_text("import own_net_helper\n")
    (tmp_path / "job" / "own_net_helper.py").write_text("")
    (tmp_path / "job" / "unused.py").write_text("")
    (tmp_path / "run").mkdir()
    start(tmp_path)
    yield tmp_path
    forget()


def start(place: Path) -> list[str]:
    """What `train` does; returns what it tells."""
    told: list[str] = []
    forget()
    use_job_folder(place / "job")
    import_plugin("own_net_probe")
    record_code(RunFolder(place / "run"), JOB, RecordingReporter(told))
    forget()
    return told


def use(run: Path, given: str | None = None) -> list[str]:
    told: list[str] = []
    use_code_of(str(run), RunFolder(run), JOB, given, RecordingReporter(told))
    return told


def test_the_code_is_found_where_it_was_in_training(place: Path) -> None:
    record = json.loads((place / "run" / CODE).read_text())
    assert record["files"] == {f"{name}.py": hashlib.sha256((place / "job" / f"{name}.py").read_bytes()).hexdigest()
                               for name in sorted(MODULES)}  # fmt: skip
    assert use(place / "run") == []
    assert job_folder() == (place / "job").resolve()
    assert import_plugin("own_net_probe").__file__ == str(place / "job" / "own_net_probe.py")


def test_a_run_that_was_moved_keeps_its_code(place: Path) -> None:
    (place / "run").rename(place / "moved")
    assert use(place / "moved") == []
    assert job_folder() == (place / "job").resolve()


def test_changed_code_is_told(place: Path) -> None:
    (place / "job" / "own_net_helper.py").write_text("x = 1\n")
    (place / "job" / "unused.py").write_text("x = 1\n")
    [line] = use(place / "run")
    assert "own_net_helper.py" in line
    assert "own_net_probe" not in line
    assert "unused" not in line
    [line] = start(place)
    assert "own_net_helper.py" in line, "a resumed run says it, too"
    assert start(place) == use(place / "run") == []


@pytest.mark.parametrize("how", ["another user", "another folder", "no seal", "not JSON", "missing"])
def test_nothing_is_imported_because_a_folder_from_elsewhere_says_so(
    how: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "run" / CODE
    record = json.loads(file.read_text())
    if how == "another user":
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "another home"))
    elif how == "another folder":
        shutil.copytree(place / "job", place / "evil")
        file.write_text(json.dumps(record | {"folder": str(place / "evil")}))
    elif how == "no seal":
        file.write_text(json.dumps(record | {"seal": ""}))
    elif how == "not JSON":
        file.write_bytes(b"\xff{")
    else:
        file.unlink()
    shutil.copy(place / "job" / "own_net_probe.py", place / "run")
    monkeypatch.chdir(place / "job")
    with pytest.raises(UserError) as refused:
        use(place / "run")
    assert "--code" in str(refused.value.fix)
    assert job_folder() is None
    assert use(place / "run", str(place / "job")) == [], "unless the user names the folder"
    assert job_folder() == (place / "job").resolve()


def test_code_that_is_gone_is_asked_for(place: Path) -> None:
    (place / "job").rename(place / "moved")
    with pytest.raises(UserError) as refused:
        use(place / "run")
    assert "--code" in str(refused.value.fix)
    with pytest.raises(UserError):
        use(place / "run", str(place / "nothing here"))
    assert use(place / "run", str(place / "moved")) == []


def test_a_model_of_ours_takes_no_code(place: Path) -> None:
    job = JOB.model_copy(update={"model": JOB.model.model_copy(update={"name": None})})
    for known in (job, None):
        use_code_of("run", RunFolder(place / "run"), known, None, SILENT)
        with pytest.raises(UserError):
            use_code_of("run", RunFolder(place / "run"), known, str(place / "job"), SILENT)
