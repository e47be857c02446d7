"""docs/how-to/debugging.md: prints of its example, the script that finds a NaN, and the error with JAX_DEBUG_NANS."""

from __future__ import annotations

import importlib.util
import re
import shutil
import traceback
from pathlib import Path

import jax
import pytest

from forerun.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("model.layers=1", "model.embed=16", "sequence=16", "device=cpu", "devices=1", "sample.tokens=0")
FAULTY = "objective.options={faulty: true}"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job of the page, with its objective and some text beside it."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/how-to/debugging.md").read_text("utf-8")
    found = re.search(r"```yaml\n(.*?)```", page, re.S)
    assert found
    (tmp_path / "job.yaml").write_text(found[1])
    (tmp_path / "text").mkdir()
    (tmp_path / "text/tale.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    shutil.copy(ROOT / "examples/debugging/watched.py", tmp_path)
    return tmp_path / "job.yaml"


def test_the_step_prints_a_line_for_each_micro_batch(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_devices = ("devices=2", "mesh.fsdp=2", "micro_batch=1")  # the rows of a micro-batch are on both
    assert main(["train", str(job), *SMALL, *two_devices, "name=printed"]) == 0
    jax.effects_barrier()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hidden: ")]
    assert len(lines) == 2 * 2, "two steps of two micro-batches"
    assert all(line.endswith("finite True") for line in lines)


def test_a_nan_ends_the_run_if_jax_looks_for_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with jax.debug_nans(True):
        assert main(["train", str(job), *SMALL, "name=nan", FAULTY]) == 2
    jax.effects_barrier()
    assert "[E-RUN-083]" in capsys.readouterr().err


def test_the_script_finds_the_line_of_the_nan(job: Path) -> None:
    spec = importlib.util.spec_from_file_location("first_nan", ROOT / "examples/debugging/first_nan.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.raises(FloatingPointError) as caught:
        script.main(str(job), *SMALL, "micro_batch=4", FAULTY)
    jax.effects_barrier()
    places = [
        frame for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename.endswith("watched.py")
    ]
    assert "jnp.log" in (places[-1].line or "")
