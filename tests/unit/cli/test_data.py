from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forerun.cli.main import main
from forerun.data.order.ledger import entries

JOB = """\
model: {layers: 1, embed: 32, heads: 2}
data: {path: chat.jsonl, chat_template: chatml, tokenizer: bytes, store: store}
sequence: 128
batch: 8
steps: 3
device: cpu
sample: {tokens: 0}
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": f"is {n + 1}"}]}
        for n in range(60)
    ]
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("job.yaml").write_text(JOB)


def test_it_shows_what_the_model_will_see(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "job.yaml", "--html", "page.html", "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "messages (chat)" in out
    assert "<|im_start|>assistant" in out
    assert "⟦is " in out
    HTMLParser().feed(Path("page.html").read_text())
    assert "padding × " in Path("page.html").read_text()


def test_a_folder_for_the_page_that_is_not_there_is_said_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "job.yaml", "--html", "nowhere/page.html"]) == 2
    assert "[E-COMMAND-006]" in capsys.readouterr().err
    assert not Path("store").exists()


def test_shards_in_any_order_make_the_store_that_one_build_makes(capsys: pytest.CaptureFixture[str]) -> None:
    for shard in ("1/2", "0/2", "1/2"):
        assert main(["data", "job.yaml", "--shard", shard]) == 0
    assert capsys.readouterr().out.count("all units are complete") >= 1
    assert main(["data", "job.yaml", "data.store=other"]) == 0
    files = {
        folder: {p.relative_to(folder): p.read_bytes() for p in Path(folder).rglob("*.*") if p.suffix != ".json"}
        for folder in ("store", "other")
    }
    assert len(files["store"]) > 2
    common = files["store"].keys() & files["other"].keys()
    assert {p for p in files["store"] if "rows" not in p.parts} <= common
    assert all(files["store"][p] == files["other"][p] for p in common)


@pytest.mark.parametrize("shard", ["2/2", "a/b", "3", "-1/2", "0/0"])
def test_a_shard_is_one_of_some(shard: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "job.yaml", f"--shard={shard}"]) == 2
    assert "0/4, 1/4, 2/4" in capsys.readouterr().err


def test_a_flipped_bit_in_the_store_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "job.yaml", "--verify"]) == 0
    [file] = Path("store").glob("*/unit-*/train.tokens")
    raw = bytearray(file.read_bytes())
    raw[7] ^= 4
    file.write_bytes(raw)
    assert main(["data", "job.yaml", "--verify"]) == 2
    assert "train.tokens is damaged" in capsys.readouterr().err


def test_the_ledger_of_a_run_is_the_order_of_its_job(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["devices=1", "remat=none", "precision.compute=float32", "model.embed=8", "checkpoint.every=3"]
    assert main(["train", "job.yaml", "name=run", "data.ledger=true", *quick]) == 0
    ledger = Path("runs/run/ledger.jsonl")
    assert [step for step, _ in entries(ledger)] == [1, 2, 3]
    assert main(["data", "job.yaml", "--ledger", str(ledger)]) == 0
    assert "3 steps and" in capsys.readouterr().out
    assert main(["data", "job.yaml", "seed=1", "--ledger", str(ledger)]) == 2
    assert "1 learned from" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.tokens", "train.learned"])
def test_a_run_on_a_damaged_store_ends_before_it_uses_the_damage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "job.yaml"]) == 0
    [file] = Path("store").glob(f"*/unit-*/{name}")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    capsys.readouterr()
    assert main(["train", "job.yaml", "name=run", "data.ledger=true"]) == 2
    assert f"{file} is damaged" in capsys.readouterr().err
    metrics = Path("runs/run/metrics.jsonl")
    assert not metrics.exists() or "loss" not in metrics.read_text()
