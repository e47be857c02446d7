"""Files beside a job and in the working directory are never imported, except for a plug-in that the job names.

Every command runs in a folder that has a module for each name that Python could import. Each module writes a file next
to itself when it is executed.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from fake import FakeCloud

from forerun.cli.commands import COMMANDS
from forerun.exit_codes import USER_MISTAKE

# Packages that jax, lm-eval and others try to import where they are not installed, and modules that Python itself runs.
OPTIONAL = (
    "flax",
    "google",
    "jax_rocm7_plugin",
    "jax_cuda13_plugin",
    "libtpu",
    "mlflow",
    "mpi4py",
    "nvidia",
    "tensorflow",
)
OPTIONAL += ("IPython", "cupy", "jax_cuda12_plugin", "portpicker", "scipy", "sitecustomize", "torch", "usercustomize")
MARK = "open(__file__ + '.ran', 'w').close()\n"
JOB = """\
model: {layers: 1, embed: 32, heads: 2}
data: {path: text.txt, feeders: 1}
sequence: 32
batch: 2
steps: 2
precision: {compute: float32}
remat: none
sample: {tokens: 0}
"""
CACHE = "distil: {teacher: ./exported, cache: ./words, top_k: 4}\n"
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
MODEL = """\
from dataclasses import dataclass

import jax.numpy as jnp
import sibling
from forerun.models.base import Readout
from forerun.nn.spec import Normal, ParamSpec

jnp.zeros(3).block_until_ready()  # starts jax's backend while this module is imported


@dataclass(frozen=True)
class Net:
    vocab: int
    heads = None

    def specs(self):
        return {"embed": ParamSpec((self.vocab, 8), "VE", Normal(1.0))}

    def apply(self, params, tokens_BS, segments_BS, positions_BS, compute):
        return Readout(params["embed"][tokens_BS].astype(compute.dtype), params["embed"].astype(compute.dtype))

    def flops_per_token(self, sequence):
        return float(sibling.NUMBER)
"""
OBJECTIVE = """\
from dataclasses import dataclass

import jax.numpy as jnp
import sibling
from forerun.objectives.base import Plain, Sums
from forerun.objectives.cross_entropy import cross_entropy


@dataclass(frozen=True)
class Loss(Plain):
    chunk: int

    def __call__(self, model, params, batch, compute):
        out = model.apply(params, batch.tokens, batch.segments, batch.positions, compute)
        nats = cross_entropy(out.hidden_BSE, out.matrix_VE, batch.targets, batch.weights, self.chunk, out.softcap)
        return Sums(sibling.NUMBER * nats, jnp.sum(batch.weights), {})
"""
TRACKER = """\
from pathlib import Path

import sibling


class Lines:
    def begin(self, run):
        self._file = Path(run.folder, "tracked.txt")

    def send(self, rows):
        with self._file.open("a") as file:
            file.writelines(f"{row['step']} {sibling.NUMBER}\\n" for row in rows)
"""
# In this order: a command may need what one before it wrote.
RUNS = {
    "schema": ("schema", "--output", "schema.json"),
    "hardware": ("hardware", "chips"),
    "explain": ("explain", "E-JOB-018"),
    "init": ("init", "--recipe", "pretrain", "new.yaml"),
    "convert": ("convert", "axolotl.yaml"),
    "doctor": ("doctor",),
    "data": ("data", "job.yaml", "--samples", "1"),
    "tokenizer": ("tokenizer", "train", "text.txt", "--vocab", "300", "--to", "tokenizer"),
    "check": ("check", "job.yaml"),
    "plan": ("plan", "job.yaml", "--on", "v5e-1", "--no-cache"),
    "train": ("train", "job.yaml"),
    "train --supervise": ("train", "--supervise", "job.yaml", "name=supervised", "data.feeders=0"),
    "sweep": ("sweep", "job.yaml", "name=swept", "seed=1,2"),
    "export": ("export", "runs/job", "--to", "exported"),
    "generate": ("generate", "./exported", "--batch", "prompts.jsonl", "--max-tokens", "2"),
    "chat": ("chat", "./exported", "--max-tokens", "2"),
    "eval": ("eval", "runs/job", "--data", "text.txt", "--context", "32"),
    "cache": ("cache", "cache.yaml"),
    "profile": ("profile", "job.yaml", "--steps", "1", "--to", "profiled"),
    "report": ("report", "runs/job", "--html", "report.html"),
    "compare": ("compare", "runs/job", "runs/supervised"),
    "watch": ("watch", "runs/job", "--once"),
    "runs": ("runs",),
    "manifest": ("manifest", "job.yaml", "--for", "slurm", "--nodes", "2"),
}
# With the address of a fake cloud. There is no run of this name, so the last ones end with an error of the user.
CLOUD_RUNS = {
    "run": ("run", "job.yaml", "--on", "v5e-1", "--bucket", "gs://bucket/runs", "--dry-run"),
    "ps": ("ps",),
    "down": ("down", "--all", "--yes"),
    "logs": ("logs", "absent", "--no-follow"),
    "stop": ("stop", "absent"),
    "fetch": ("fetch", "absent"),
}


def importable() -> set[str]:
    """Return the top-level names of the standard library, of all installed packages, and of optional ones."""
    return {*sys.stdlib_module_names, *(module.name for module in pkgutil.iter_modules()), *OPTIONAL}


def plant(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / f"{name}.py").write_text(MARK)
    for name in ("jax_plugins/evil", "evil"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(MARK)
    # An installed package registers a plug-in of jax in this way.
    (folder / "evil-1.dist-info").mkdir()
    (folder / "evil-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (folder / "evil-1.dist-info" / "entry_points.txt").write_text("[jax_plugins]\nevil = evil\n")


def executed(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.ran")}


def run(words: Iterable[str], folder: Path, shell: dict[str, str], code: int = 0) -> None:
    for mark in folder.rglob("*.ran"):  # of a test that failed before
        mark.unlink()
    ran = subprocess.run(
        ["forerun", *words], cwd=folder, env=shell, input="Hello\n", capture_output=True, text=True, timeout=600
    )
    marks = executed(folder)
    assert not marks, (marks, ran.stderr)
    assert ran.returncode == code, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    plant(folder, importable() - {"forerun"})
    (folder / "forerun.py").write_text(MARK)
    (folder / "job.yaml").write_text(f"name: job\n{JOB}")
    (folder / "cache.yaml").write_text(JOB + CACHE)
    (folder / "text.txt").write_text("A river ran past the mill and under the stone bridge.\n" * 40)
    (folder / "axolotl.yaml").write_text("base_model: owner/name\ndatasets: [{path: text.txt}]\nsequence_len: 64\n")
    (folder / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    return folder


def test_every_command_is_run_here() -> None:
    assert {words[0] for words in (*RUNS.values(), *CLOUD_RUNS.values())} == set(COMMANDS)


@pytest.mark.parametrize("name", RUNS)
def test_no_command_imports_from_the_working_directory_or_the_jobs_folder(
    name: str, folder: Path, shell: dict[str, str]
) -> None:
    run(RUNS[name], folder, shell)
    if name == "export":
        (folder / "exported" / "chat_template.jinja").write_text(CHAT)


def test_no_cloud_command_imports_from_the_working_directory(folder: Path, shell: dict[str, str]) -> None:
    with FakeCloud() as cloud:
        for name, words in CLOUD_RUNS.items():
            code = USER_MISTAKE if "absent" in words else 0
            run(words, folder, shell | cloud.environment() | {"XDG_CONFIG_HOME": str(folder / f"config-{name}")}, code)


@pytest.fixture(scope="module")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with three plug-ins beside it, which import a sibling, and modules that jax would run."""
    folder = tmp_path_factory.mktemp("plugins")
    plant(folder, ("nvidia", "libtpu", "xxhash", "yaml", "sitecustomize"))
    (folder / "sibling.py").write_text("NUMBER = 3\n")
    (folder / "own_model.py").write_text(MODEL)
    (folder / "own_loss.py").write_text(OBJECTIVE)
    (folder / "own_tracker.py").write_text(TRACKER)
    (folder / "text.txt").write_text("A river ran past the mill and under the stone bridge.\n" * 40)
    named = 'model: {name: "own_model:Net"}\nobjective: {name: "own_loss:Loss"}\ntrack: {to: "own_tracker:Lines"}\n'
    (folder / "job.yaml").write_text(f"name: own\n{JOB.partition(chr(10))[2]}{named}")
    return folder


def test_plugins_and_their_siblings_are_imported_and_nothing_else(plugin_folder: Path, shell: dict[str, str]) -> None:
    elsewhere = plugin_folder / "elsewhere"
    elsewhere.mkdir()
    job = str(plugin_folder / "job.yaml")
    for words in (("check", job), ("data", job), ("plan", job, "--on", "v5e-1", "--no-cache")):
        run(words, elsewhere, shell)
    for name, option in (("alone", ()), ("supervised", ("--supervise",))):
        run(("train", *option, job, f"name={name}", "data.feeders=0"), elsewhere, shell)
        assert (elsewhere / "runs" / name / "tracked.txt").read_text() == "1 3\n2 3\n"
    run(("eval", "runs/alone", "--data", "../text.txt", "--context", "32"), elsewhere, shell)
    run(("generate", "runs/alone", "A river", "--max-tokens", "2"), elsewhere, shell)
    run(("export", "runs/alone", "--to", "exported"), elsewhere, shell)
    code = ("--code", str(plugin_folder))
    run(("generate", "./exported", "A river", "--max-tokens", "2", *code), elsewhere, shell)
    assert executed(plugin_folder) == set()
