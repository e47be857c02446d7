"""Every notebook, executed completely in a real kernel on the CPU. Its cell with settings is replaced by tiny ones.

CI runs this file on Python 3.13 only, which is the version of Colab: see `.ci/run`. No notebook uses the network here:
the text is a local file, and the model of the hub is a folder that forerun has exported.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

import forerun as fr

ROOT = Path(__file__).resolve().parents[2]
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 60
CHATS = [
    {"messages": [{"role": "user", "content": f"Add {n} and 1."}, {"role": "assistant", "content": f"{n + 1}"}]}
    for n in range(600)  # 2 % of them are held out
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Settings = Callable[[Path], dict[str, Any]]
SETTINGS: dict[str, Settings] = {
    "quickstart": lambda inputs: {
        "TEXT": (inputs / "text.txt").as_uri(),
        "PLAN_MODEL": str(inputs / "model"),
        "PLAN_SLICES": ["v5e-1"],
        "STEPS": 6,
        "SIZE": {"layers": 1, "embed": 16, "heads": 2},
    },
    "plan_and_search": lambda inputs: {
        "MODEL": str(inputs / "model"),
        "SLICES": ["v5e-1"],
        "SEARCH_ON": ["v5e-1"],
        "SEQUENCE": 64,
        "BATCH": 8,
        "STEPS": 10,
        "MAX_USD": 20.0,
    },
    "lora_colab_tpu": lambda inputs: {
        "MODEL": str(inputs / "model"),
        "DATA": str(inputs / "chats.jsonl"),
        "STORE": "store",
        "BUCKET": "",
        "SLICES": ["v5e-1"],
        "SEQUENCE": 64,
        "BATCH": 8,
        "MICRO_BATCH": 8,
        "STEPS": 4,
        "QUESTION": "Add 1 and 1.",
    },
    "kaggle_tpu_v5e_8": lambda inputs: {
        "MODEL": str(inputs / "model"),
        "DATA": str(inputs / "chats.jsonl"),
        "STORE": "working/runs",
        "PREVIOUS": "",
        "BUCKET": "",
        "SLICE": "v5e-8",
        "SEQUENCE": 64,
        "BATCH": 8,
        "MICRO_BATCH": 1,
        "STEPS": 4,
        "QUESTION": "Add 1 and 1.",
    },
    "custom_model": lambda inputs: {
        "TEXT": (inputs / "text.txt").as_uri(),
        "OPTIONS": {"embed": 16, "layers": 1, "mlp": 32, "reach": 2},
        "SLICES": ["v5e-1"],
        "SEQUENCE": 64,
        "BATCH": 8,
        "STEPS": 6,
    },
    "reading_a_run": lambda inputs: {
        "RUNS": [],
        "TEXT": (inputs / "text.txt").as_uri(),
        "SIZE": {"layers": 1, "embed": 16, "heads": 2},
        "RATES": [1e-2, 1e-3],
        "STEPS": 6,
    },
}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text, conversations, and a model that was trained for one step, as the hub has it."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "text.txt").write_text(TEXT, "utf-8")
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS), "utf-8")
    job = fr.Job(
        name="base",
        model={"layers": 1, "embed": 16, "heads": 2},
        data=str(folder / "text.txt"),
        sequence=32,
        batch=8,
        steps=1,
        device="cpu",
        devices=1,
        precision={"compute": "float32"},
        runs=str(folder / "runs"),
        sample={"tokens": 0},
    )
    fr.export(fr.train(job).folder, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHATML, "utf-8")
    return folder


def executed(name: str, inputs: Path, folder: Path, shell: dict[str, str]) -> dict[str, list[Any]]:
    """Execute a notebook with tiny settings in `folder`, and return the outputs of its code cells by id."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    [settings] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    values = SETTINGS[name](inputs)
    assert assigned(settings.source) == set(values), "each setting has a tiny value"
    settings.source = "\n".join(f"{key} = {value!r}" for key, value in values.items())
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env={**shell, "JAX_PLATFORMS": "cpu", "PYDEVD_DISABLE_FILE_VALIDATION": "1", "HF_HUB_OFFLINE": "1"})
    if kept := os.environ.get("FORERUN_KEEP_NOTEBOOK"):
        nbformat.write(notebook, Path(kept) / f"{name}.ipynb")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    return {cell.id: cell.outputs for cell in code}


def assigned(source: str) -> set[str]:
    """Return the names that a cell assigns."""
    import ast

    targets = [target for node in ast.parse(source).body if isinstance(node, ast.Assign) for target in node.targets]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def text_of(outputs: list[Any]) -> str:
    """Return what a cell printed and the text of what it displayed."""
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "".join(parts)


def html_of(outputs: list[Any]) -> str:
    """Return the HTML that a cell displayed."""
    return "".join(output.get("data", {}).get("text/html", "") for output in outputs)


@pytest.mark.aot
def test_quickstart(inputs: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    outputs = executed("quickstart", inputs, tmp_path, shell)
    assert text_of(outputs["install"]).startswith("ready: forerun")
    assert "v5e-1" in html_of(outputs["plan"])
    assert 'value="6" max="6"' in html_of(outputs["train"])
    assert "&lt;svg" in html_of(outputs["report"])
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
    assert len(text_of(outputs["generate"])) > 6
    run = fr.open_run(tmp_path / "runs" / "quickstart")
    assert run.summary["steps"] == 6


@pytest.mark.aot
def test_plan_and_search(inputs: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    outputs = executed("plan_and_search", inputs, tmp_path, shell)
    assert "<iframe" in html_of(outputs["plan"])
    assert text_of(outputs["rows"]).count("fits: True") == 1
    assert fr.load_job(tmp_path / "plans" / "cheapest.yaml").batch == 8
    assert "on demand" in text_of(outputs["cost"])
    trace = json.loads(gzip.decompress((tmp_path / "plans" / "step.trace.json.gz").read_bytes()))
    assert len(trace["traceEvents"]) > 10


@pytest.mark.aot
def test_lora_colab_tpu(inputs: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    outputs = executed("lora_colab_tpu", inputs, tmp_path, shell)
    assert "v5e-1" in html_of(outputs["plan"])
    assert 'value="4" max="4"' in html_of(outputs["train"])
    run = fr.open_run(tmp_path / "store" / "runs" / "lora")
    assert run.finished
    assert "model.safetensors" in text_of(outputs["export"]).split()
    assert not (tmp_path / "store" / "lora-merged" / "adapter_config.json").exists()
    assert str(inputs / "model") in text_of(outputs["test"])


@pytest.mark.aot
def test_kaggle_tpu_v5e_8(inputs: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    outputs = executed("kaggle_tpu_v5e_8", inputs, tmp_path, shell)
    assert "v5e-8" in html_of(outputs["plan"])
    assert text_of(outputs["resume"]).startswith("starts")
    assert fr.open_run(tmp_path / "working" / "runs" / "kaggle").summary["steps"] == 4
    assert (tmp_path / "working" / "exported" / "model.safetensors").is_file()


@pytest.mark.aot
def test_custom_model(inputs: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    outputs = executed("custom_model", inputs, tmp_path, shell)
    by_hand, first = map(float, text_of(outputs["step"]).split())
    assert by_hand == first
    row = fr.open_run(tmp_path / "runs" / "own").metrics
    assert row["loss"][0] == pytest.approx(row["nats"][0] + 1e-2 * row["log_z_squared"][0], rel=1e-5)


def test_reading_a_run(inputs: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    outputs = executed("reading_a_run", inputs, tmp_path, shell)
    first, second = (fr.open_run(tmp_path / "runs" / name) for name in ("lr-0.01", "lr-0.001"))
    assert f"{first.metrics['loss'][-1]:.4f}" in text_of(outputs["plain"])
    assert text_of(outputs["compare"]).startswith("{'optimizer.lr': ['0.01', '0.001']")
    assert second.job.name in html_of(outputs["compare"])
    shares = [float(line.split()[-1].removesuffix("%")) for line in text_of(outputs["goodput"]).splitlines()]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert "tokens_per_second" in text_of(outputs["pandas"])
