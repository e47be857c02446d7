"""The commands and jobs of docs/how-to/data.md, as printed there, and the example of supervised fine-tuning."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from forerun.track.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/data.md").read_text()
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
JOBS = dict(re.findall(r'^```yaml title="([\w.]+)"\n(.*?)^```$', PAGE, re.M | re.S))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("runs"))
    return tmp_path


def run(command: str, root: Path, shell: dict[str, str]) -> str:
    ran = subprocess.run(["bash", "-c", command], cwd=root, env=shell, capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def rows(path: Path, column: str, count: int, word: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: f"{word} number {n}"}) + "\n" for n in range(count)))


def test_the_view_of_the_page(root: Path, shell: dict[str, str]) -> None:
    [command] = COMMANDS
    told = run(command, root, shell)
    assert "messages (chat)" in told
    assert "Finish the sentence." in told
    assert (root / "data.html").stat().st_size > 10_000


def test_the_jobs_of_the_page_train(root: Path, shell: dict[str, str]) -> None:
    shown = {
        "job.yaml": "column content",
        "mixture.yaml": "letters: 1 file, jsonl",
        "template.yaml": "columns question, reasoning, answer, by the template of data.columns.text, the first 20 rows",
        "messages.yaml": "chat, columns question, reasoning, answer",
    }
    assert set(JOBS) == set(shown)
    rows(root / "rows" / "1.jsonl", "content", 40, "row")
    rows(root / "stories.jsonl", "text", 40, "story")
    rows(root / "letters.jsonl", "text", 400, "letter")
    thoughts = [{"question": f"What is {n}?", "reasoning": "Count.", "answer": str(n)} for n in range(40)]
    (root / "thoughts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in thoughts))
    for name, job in JOBS.items():
        (root / name).write_text(job)
        told = run(f"forerun train {name} sample.tokens=0", root, shell)
        assert shown[name] in " ".join(told.split()), told


def test_fine_tuning_learns_the_answers(root: Path, shell: dict[str, str]) -> None:
    small = "model.layers=2 model.embed=64 sequence=256"
    told = run(f"forerun train examples/sft/job.yaml steps=25 {small}", root, shell)
    assert "chat, column messages" in told
    assert re.search(r"validation: [\d,]+ of [\d,]+ documents", told)
    lines = read_metrics(root / "runs/sft/metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    assert lines[-1]["validation_loss"] < 0.7 * losses[0]
    told = run(f"forerun data examples/sft/job.yaml {small} --ledger runs/sft/ledger.jsonl", root, shell)
    assert "25 steps and" in told
