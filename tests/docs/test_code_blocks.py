"""Every code block of the tutorials, the how-to guides and the page on GPUs runs, or says why not.

A block that cannot run has the line `<!-- not run: REASON -->` before it. `<!-- run with: KEY=VALUE ... -->` adds
overrides to its commands, and `<!-- run first: COMMAND -->` prepares what it needs. `train`, `cache` and `sweep` run
two steps on one CPU device. Models of the hub come from a local server, and all of them are one tiny model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from code_blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
sys.path.append(str(ROOT / "tests" / "unit" / "hub"))
PAGES = [
    *sorted(path for kind in ("tutorials", "how-to") for path in (ROOT / "docs" / kind).rglob("*.md")),
    ROOT / "docs" / "gpu.md",
]
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-135M",
          "HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-360M", "google/gemma-3-4b-it",
          "owner/name")  # fmt: skip
DATASETS = ("rzeraat/law", "roneneldan/TinyStories")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
pytestmark = [pytest.mark.aot, pytest.mark.timeout(1800)]


def write_tiny_model(folder: Path) -> None:
    """Write a model of one layer as `export` writes it: random weights, a byte tokenizer, a chat template."""
    import jax

    from forerun.config.schema import Model
    from forerun.models.families.registry import family_for
    from forerun.models.model_facts import config_of, model_of
    from forerun.nn import spec
    from forerun.weights_io import documents
    from forerun.weights_io.write import write_params

    folder.mkdir()
    section = Model(layers=1, embed=32, heads=2, kv_heads=1, head_dim=32, mlp=64, vocab=264, qk_norm=True)
    config, model = config_of(section), model_of(section)
    family = family_for(config)
    params = jax.jit(lambda key: spec.initial(model.specs(), key))(jax.random.key(0))
    write_params(folder, params, family.table, model, "F32")
    documents.write_json(folder / "config.json", documents.config_json(family, config, None, "F32", 256))
    documents.write_tokenizer(None, folder, 256)
    documents.write_chat_template(folder, CHATML, {}, None)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The environment of the runner: a hub with tiny models and datasets, and caches of its own."""
    from hub_server import HubServer

    folder = tmp_path_factory.mktemp("pages")
    tiny = folder / "tiny"
    write_tiny_model(tiny)
    for name in MODELS:
        place = folder / "hub" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(tiny)
    for name in DATASETS:
        place = folder / "hub" / "datasets" / name
        place.mkdir(parents=True)
        text = "".join(json.dumps({"text": f"Row {n}. It was the best of times."}) + "\n" for n in range(200))
        (place / "train.jsonl").write_text(text)
    with HubServer(folder / "hub") as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{SUPPORT}",
        }
        yield {"folder": folder, "tiny": tiny, "environment": environment}


class PageRunner:
    """The process that runs all selected pages, because the import of jax would be most of the time of a page."""

    def __init__(self, work: dict[str, Any]) -> None:
        """Start the process."""
        self._errors = work["folder"] / "errors"
        command = [
            sys.executable,
            "-P",
            str(SUPPORT / "page_runner.py"),
            str(work["folder"] / "docs"),
            str(work["tiny"]),
        ]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                env=work["environment"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._outcomes: dict[Path, list[dict[str, Any]]] = {}

    def outcomes(self, page: Path) -> list[dict[str, Any]]:
        """Return the outcome of each block of a page, and run the page before its first use."""
        if page not in self._outcomes:
            self._outcomes[page] = list(self._run(page))
        return self._outcomes[page]

    def _run(self, page: Path) -> Iterator[dict[str, Any]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(page, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"page": '):
                outcome = json.loads(line)
                if outcome["line"] is None:
                    return
                yield outcome
        raise AssertionError(f"the process ended:\n{self._errors.read_text()[-3000:]}")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        assert self._process.returncode == 0, self._errors.read_text()[-3000:]


@pytest.fixture(scope="module")
def runner(work: dict[str, Any]) -> Iterator[PageRunner]:
    runner = PageRunner(work)
    yield runner
    runner.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_every_block_of_a_page_runs(page: Path, runner: PageRunner) -> None:
    found = runner.outcomes(page)
    assert [row["line"] for row in found] == [block.line for block in blocks_of(page) if block.is_run]
    failed = [f"{page.relative_to(ROOT)}, line {row['line']}:\n{row['problem']}" for row in found if row["problem"]]
    assert not failed, "\n".join(failed)


def test_the_python_examples_print_results(runner: PageRunner) -> None:
    printed = "".join(row["printed"] for row in runner.outcomes(ROOT / "docs" / "how-to" / "python.md"))
    assert "True v6e-1" in printed, "the plan fits"
    assert "E-JOB-" in printed, "the error has a code"
