"""Own code that is edited between two runs of one Python process: each run trains the version on disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_job import JOB, TEXT

OBJECTIVE = """\
from dataclasses import dataclass

import jax.numpy as jnp
from forerun.objectives.base import Plain, Sums
from forerun.objectives.cross_entropy import cross_entropy
from scales import SCALE


@dataclass(frozen=True)
class Loss(Plain):
    chunk: int

    def __call__(self, model, params, batch, compute):
        out = model.apply(params, batch.tokens, batch.segments, batch.positions, compute)
        nats = cross_entropy(out.hidden_BSE, out.matrix_VE, batch.targets, batch.weights, self.chunk, out.softcap)
        return Sums(1 * SCALE * nats, jnp.sum(batch.weights), {})
"""
# The functions of every session. A process, not an imported module, trains: it is what a notebook's kernel does.
SESSION = """\
import io, json, os
from pathlib import Path

import forerun as fr
from forerun.track.display.make_display import make_display

shown = io.StringIO()


def losses(job):
    with make_display(shown) as display:
        run = fr.train(job, reporter=display)
    return [row["loss"] for row in run.metrics if "loss" in row], str(run.folder.absolute())


def edit(file, old, new):
    # Same size, and the same time: bytecode files would not notice this edit.
    path = Path(file)
    times = path.stat()
    text = path.read_text()
    assert text.count(old) == 1 and len(old) == len(new), (file, old)
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


results = {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tale.txt").write_text(TEXT)
    (tmp_path / "own_loss.py").write_text(OBJECTIVE)
    (tmp_path / "scales.py").write_text("SCALE = 1\n")
    (tmp_path / "job.yaml").write_text(JOB.replace("steps: 6", "steps: 1") + 'objective: {name: "own_loss:Loss"}\n')
    return tmp_path


def session(folder: Path, lines: str, *, path: str | None = None, cwd: Path | None = None) -> dict[str, Any]:
    """Run a session in a new process, and return its `results`."""
    script = folder / "session.py"
    script.write_text(SESSION + lines + '\nprint("RESULTS " + json.dumps([results, shown.getvalue()]))\n')
    shell = os.environ | ({"PYTHONPATH": path} if path else {})
    ran = subprocess.run(
        [sys.executable, "-P", str(script)], cwd=cwd or folder, env=shell, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found, shown = json.loads(ran.stdout.rpartition("RESULTS ")[2])
    return {**found, "shown": shown}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def code_of(run: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((Path(run) / "code.json").read_text())
    return record


def test_an_edited_objective_and_its_helper_are_trained_in_their_new_version(folder: Path) -> None:
    found = session(
        folder,
        """
for step in ("one", "edited", "helper"):
    if step == "edited":
        edit("own_loss.py", "1 * SCALE", "3 * SCALE")
    if step == "helper":
        edit("scales.py", "SCALE = 1", "SCALE = 2")
    results[step] = losses(fr.load_job("job.yaml", f"name={step}"))
results["again"] = losses(fr.load_job("job.yaml", "name=again"))
""",
    )
    (one, first_run), (edited, second_run), (helper, third_run), (again, _) = (
        found[name] for name in ("one", "edited", "helper", "again")
    )
    assert edited == pytest.approx([3 * loss for loss in one], rel=1e-5)
    assert helper == pytest.approx([6 * loss for loss in one], rel=1e-5)
    assert again == helper
    files = {"own_loss.py": OBJECTIVE, "scales.py": "SCALE = 1\n"}
    for run, changes in (
        (first_run, {}),
        (second_run, {"own_loss.py": OBJECTIVE.replace("1 * S", "3 * S")}),
        (third_run, {"own_loss.py": OBJECTIVE.replace("1 * S", "3 * S"), "scales.py": "SCALE = 2\n"}),
    ):
        record = code_of(run)
        assert record["sources"] == files | changes
        assert record["files"] == {name: sha256(text) for name, text in (files | changes).items()}
        assert record["folder"] == str(folder)
        assert record["classes"] == {"objective.name": {"class": "own_loss:Loss", "file": "own_loss.py"}}


def test_a_module_that_the_notebook_imported_is_compared_with_its_file(folder: Path) -> None:
    """The notebook imports the module through `sys.path`, edits the helper, and trains jobs without a file."""
    found = session(
        folder,
        """
edit("scales.py", "SCALE = 1", "SCALE = 1")
import own_loss

held = own_loss.Loss(4)
job = fr.Job(model={"layers": 1, "embed": 16, "heads": 2}, data="text", sequence=16, batch=8, steps=1, device="cpu",
             devices=1, precision={"compute": "float32"}, remat="none", sample={"tokens": 0},
             objective={"name": "own_loss:Loss"})
results["one"] = losses(job.model_copy(update={"name": "one"}))
edit("scales.py", "SCALE = 1", "SCALE = 4")
results["helper"] = losses(job.model_copy(update={"name": "helper"}))
results["held"] = held.chunk
""",
        path=str(folder),
    )
    (one, _), (helper, run) = found["one"], found["helper"]
    assert helper == pytest.approx([4 * loss for loss in one], rel=1e-5)
    assert code_of(run)["sources"] == {"own_loss.py": OBJECTIVE, "scales.py": "SCALE = 4\n"}
    assert code_of(run)["folder"] == str(folder)
    assert found["held"] == 4
    assert "scales.py" in found["shown"]


def test_classes_of_two_job_folders_with_one_name(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name, text in (("own_loss.py", OBJECTIVE), ("scales.py", "SCALE = 5\n")):
        (other / name).write_text(text)
    (other / "job.yaml").write_text((folder / "job.yaml").read_text().replace("data: text", "data: ../text"))
    found = session(
        folder,
        """
here, there = fr.load_job("job.yaml"), fr.load_job("other/job.yaml", "runs=other/runs")
results["there"] = losses(there)
results["here"] = losses(here)
results["path"] = losses("other/job.yaml")
try:
    fr.train(here.model_copy(update={"name": "copy"}))
except fr.UserError as error:
    results["code"] = error.code
""",
    )
    (here, run), (there, _), (path, _) = found["here"], found["there"], found["path"]
    assert there == pytest.approx([5 * loss for loss in here], rel=1e-5)
    assert path == there
    assert code_of(run)["sources"]["scales.py"] == "SCALE = 1\n"
    assert found["code"] == "E-MODEL-051"


def test_a_class_of_the_notebook_itself(folder: Path) -> None:
    """As IPython does: the source of a cell is in linecache, and `__main__` has no file."""
    found = session(
        folder,
        f"""
import linecache

del globals()["__file__"]
for number, scale in ((1, 1), (2, 2)):
    cell = {OBJECTIVE!r}.replace("from scales import SCALE", f"SCALE = {{scale}}")
    name = f"<cell {{number}}>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    exec(compile(cell, name, "exec"))
    results[str(number)] = losses(fr.load_job("job.yaml", "objective.name=__main__:Loss", f"name=cell{{number}}"))
    results[f"cell {{number}}"] = cell
exec({OBJECTIVE!r}.replace("from scales import SCALE", "SCALE = 3"))
results["typed"] = losses(fr.load_job("job.yaml", "objective.name=__main__:Loss", "name=typed"))
""",
    )
    for number, scale in ((1, 1), (2, 2)):
        values, run = found[str(number)]
        assert values == pytest.approx([scale * loss for loss in found["1"][0]], rel=1e-5)
        assert code_of(run)["files"] == {}
        cell = found[f"cell {number}"]
        expected = {"class": "__main__:Loss", "sha256": sha256(cell), "source": cell}
        assert code_of(run)["classes"] == {"objective.name": expected}
    values, run = found["typed"]
    assert values == pytest.approx([3 * loss for loss in found["1"][0]], rel=1e-5)
    assert code_of(run)["classes"]["objective.name"]["source"] is None


PLUGINS = """\
import optax
from forerun.models.base import Readout
from forerun.nn.spec import Normal, ParamSpec


def sgd(learning_rate):
    return optax.sgd(lambda step: 1 * learning_rate(step))


class Net:
    def __init__(self, vocab):
        self.vocab, self.heads = vocab, None

    def specs(self):
        return {"embed": ParamSpec((self.vocab, 8), "VE", Normal(1.0))}

    def apply(self, params, tokens_BS, segments_BS, positions_BS, compute):
        return Readout(1 * params["embed"][tokens_BS].astype(compute.dtype), params["embed"].astype(compute.dtype))

    def flops_per_token(self, sequence):
        return 1.0


class Lines:
    def begin(self, run):
        open(f"{run.folder}/tracked.txt", "w").write("1")

    def send(self, rows):
        pass
"""


def test_edited_models_optimizers_and_trackers(folder: Path) -> None:
    (folder / "plugins.py").write_text(PLUGINS)
    (folder / "job.yaml").write_text(
        JOB.replace("steps: 6", "steps: 2").replace("{layers: 1, embed: 16, heads: 2}", "plugins:Net")
        .replace("{lr: 1e-2}", '{name: "plugins:sgd", lr: 1e-2}') + "track: plugins:Lines\n"
    )  # fmt: skip
    found = session(
        folder,
        """
for name, old, new in (("one", "", ""), ("model", "Readout(1", "Readout(0"), ("optimizer", "1 * lea", "9 * lea"),
                       ("tracker", 'write("1")', 'write("7")')):
    if old:
        edit("plugins.py", old, new)
    if name == "optimizer":
        edit("plugins.py", "Readout(0", "Readout(1")
    results[name] = losses(fr.load_job("job.yaml", f"name={name}"))
""",
    )
    one, model, optimizer, tracker = (found[name][0] for name in ("one", "model", "optimizer", "tracker"))
    assert model == pytest.approx([math.log(257)] * 2, rel=1e-4), "logits of 0"
    assert one[0] == pytest.approx(optimizer[0])
    assert abs(one[1] - optimizer[1]) > 1e-3
    assert tracker == optimizer
    assert (Path(found["one"][1]) / "tracked.txt").read_text() == "1"
    assert (Path(found["tracker"][1]) / "tracked.txt").read_text() == "7"
    assert code_of(found["tracker"][1])["classes"].keys() == {"model.name", "optimizer.name", "track.to[0]"}


def test_a_resumed_run_reports_changed_code(folder: Path) -> None:
    found = session(
        folder,
        """
losses(fr.load_job("job.yaml"))
edit("scales.py", "SCALE = 1", "SCALE = 6")
before = len(shown.getvalue())
results["run"] = losses(fr.load_job("job.yaml", "steps=2"))[1]
results["told"] = shown.getvalue()[before:]
""",
    )
    [line] = [line for line in found["told"].splitlines() if "last started" in line]
    assert "scales.py" in line
    assert "own_loss.py" not in line
    assert code_of(found["run"])["sources"]["scales.py"] == "SCALE = 6\n"
