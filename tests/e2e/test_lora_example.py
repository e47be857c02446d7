"""examples/lora by the commands in its job: a small model, adapters beside it, a PEFT folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from forerun.track.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for name in ("lora", "sft", "quickstart"):
        shutil.copytree(ROOT / "examples" / name, folder / "examples" / name, ignore=shutil.ignore_patterns("base"))
    return folder


def run(command: str, place: Path, shell: dict[str, str]) -> str:
    done = subprocess.run(
        command.split(), cwd=place, env=shell, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def looks(place: Path, name: str) -> list[float]:
    rows = read_metrics(place / "runs" / name / "metrics.jsonl")
    return [row["validation_loss"] for row in rows if "validation_loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_adapters_learn_beside_a_model_at_rest(place: Path, shell: dict[str, str]) -> None:
    readme = (ROOT / "examples/lora/README.md").read_text()
    run("forerun train examples/lora/base.yaml", place, shell)
    run("forerun export runs/lora-base --to examples/lora/base", place, shell)
    told = run("forerun train examples/lora/job.yaml", place, shell)
    assert re.search(r"parameters, [\d.]+ ?k of them trainable", told), told
    first, last = looks(place, "lora")
    expected = [float(found) for found in re.findall(r"validation loss (\d\.\d\d)", readme)]
    assert [first, last] == pytest.approx(expected, abs=0.15)
    told = run("forerun export runs/lora --to my-adapter", place, shell)
    assert "bit for bit" in told
    config = json.loads((place / "my-adapter/adapter_config.json").read_text())
    assert config["target_modules"][-1] == "self_attn.v_proj"
    assert (place / "my-adapter/adapter_model.safetensors").stat().st_size < 400_000
    assert run("forerun generate runs/lora It --max-tokens 4", place, shell)
