from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from forerun.cli.main import main
from forerun.config import keys
from forerun.verbs.check.check import table
from forerun.verbs.check.values import Group, Row

Capture = pytest.CaptureFixture[str]
JOB = "model: qwen3-0.6b\ndata: gs://bucket/texts\nsteps: 200\nbatch: 64\n"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    return "job.yaml"


def rows_of(out: str) -> dict[str, tuple[str, str]]:
    """name -> (value, origin), cut at runs of two spaces or more; a long value has its origin on the next line."""
    joined = re.sub(r"\n {9,}(?=\S)", "  ", out)
    lines = [re.split(r"\s{2,}", line.strip()) for line in joined.splitlines() if line.startswith("  ")]
    return {name: (value, origin) for name, value, origin in lines}


def derived_of(out: str) -> dict[str, tuple[str, str]]:
    return rows_of(out.split("\nderived for ")[1])


def test_defaults_of_an_optimizer_are_shown_with_their_reason(job: str, capsys: Capture) -> None:
    words = ["optimizer.name=muon", "optimizer.schedule=inverse_sqrt", "optimizer.groups=[{match: embed, lr_scale: 2}]"]
    assert main(["check", "--all", job, *words, "--on", "v5e-8"]) == 0
    out = capsys.readouterr().out
    rows, derived = rows_of(out.split("\nderived for ")[0]), derived_of(out)
    value, reason = rows["optimizer.lr"]
    assert value == "0.0003"
    assert "muon.scale" in reason
    assert rows["optimizer.final_lr"] == ("-", "default: inverse_sqrt does not use it")
    value, reason = derived["optimizer"]
    # Qwen3-0.6B: 440M parameters in matrices with 4 bytes each, 156M others with 8.
    assert value == "muon"
    assert "trains 440M parameters" in reason
    assert "5.04 bytes" in reason
    capsys.readouterr()
    assert main(["check", job, "optimizer.groups=[{match: wte, lr_scale: 2}]", "--on", "v5e-8"]) == 2
    assert "E-METHOD-030" in capsys.readouterr().err


def test_every_key_is_shown_with_value_and_origin(job: str, capsys: Capture) -> None:
    assert main(["check", "--all", job, "optimizer.lr=8e-5", "--on", "v5e-8"]) == 0
    out, err = capsys.readouterr()
    assert err == "warning: data.path gs://bucket/texts is not on this machine\n"
    config, derived = out.split("\nderived for ")
    rows = rows_of(config)
    absent = {key for key, field in keys.fields().items() if keys.section_of(field) and field.default is None}
    nested = {key for key in keys.leaf_keys() if key.rpartition(".")[0] in absent}
    assert {"model.rope_scaling", "lora"} <= absent
    assert set(rows) == set(keys.leaf_keys()) - nested | absent
    assert rows["batch"] == ("64", "job.yaml:4")
    assert rows["data.path"] == ("gs://bucket/texts", "job.yaml:2")
    assert rows["model.name"] == ("qwen3-0.6b", "job.yaml:1")
    assert rows["optimizer.lr"] == ("8.0e-05", "command line")
    assert rows["optimizer.clip"] == ("1.0", "default: 1.0 stops rare spikes")
    assert rows["optimizer.ema"] == ("-", "default: off: it needs another copy of the weights")
    assert rows["remat.policy"] == ("full", "default: the least memory without offloading")
    assert [line for line in config.splitlines() if line and line[0] != " "] == [
        *(
            "job",
            "model",
            "data",
            "optimizer",
            "mesh",
            "remat",
            "precision",
            "experts",
            "guard",
            "checkpoint",
            "validation",
            "track",
            "sample",
        )
    ]
    assert derived.startswith("v5e-8\n")
    found = rows_of(derived)
    assert found["devices"] == ("8 x TPU v5e", "--on v5e-8")
    assert found["mesh"] == ("1x8x1", "data x fsdp x tp on 8 devices")
    assert found["micro_batch"][0] == "8"
    assert found["effective batch"][0] == "64"
    assert found["tokens per step"] == ("65.5k", "effective batch x sequence")
    assert found["warm-up steps"] == ("6", "3 % of 200 steps")
    assert found["attention kernel"] == ("splash", "auto: for TPU v5e")
    assert found["remat"][0] == "full"


def test_what_a_named_size_brings(job: str, capsys: Capture) -> None:
    """596M parameters is what is published for Qwen3-0.6B, embeddings counted once."""
    assert main(["check", "--all", job, "--on", "v6e-1", "model.kv_heads=4", "model.mlp=null"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["model.layers"] == ("28", "from qwen3-0.6b")
    assert rows["model.kv_heads"] == ("4", "command line")
    assert rows["model.mlp"] == ("3072", "command line: null, so from qwen3-0.6b")
    assert rows["model.window"] == ("-", "from qwen3-0.6b")
    assert main(["check", "--all", job, "--on", "v6e-1"]) == 0
    value, reason = derived_of(capsys.readouterr().out)["parameters"]
    assert value == "596M"
    assert reason == "28 layers of width 1024, 16 heads of 128 on 8 key/value heads, mlp 3072, vocabulary 151936"
    assert main(["check", "--all", job, "--on", "v5p-8", "model=llama3.1-8b"]) == 0
    scaling, origin = rows_of(capsys.readouterr().out)["model.rope_scaling"]
    assert scaling == "{factor: 8.0, high: 4.0, low: 1.0, original: 8192}"
    assert origin == "from llama3.1-8b"


def test_what_free_dimensions_bring(job: str, capsys: Capture) -> None:
    Path("text.txt").write_text("x" * 3200)
    Path("job.yaml").write_text("model: {layers: 2, embed: 96, heads: 4}\ndata: text.txt\nsequence: 32\nbatch: 8\n")
    assert main(["check", "--all", job, "--on", "v6e-1"]) == 0
    out = capsys.readouterr().out
    rows = rows_of(out.split("\nderived for ")[0])
    assert rows["model.name"][0] == "-"
    assert rows["model.kv_heads"] == ("4", "default: = heads")
    assert rows["model.head_dim"] == ("24", "default: = embed / heads")
    assert rows["model.mlp"] == ("256", "default: 8/3 embed, in whole 64s")
    assert rows["model.vocab"] == ("384", "default: the tokenizer's, in whole 128s")
    assert rows["devices"] == ("1", "default: all of v6e-1")
    assert rows["micro_batch"] == ("8", "derived: batch 8 / 1 device, no accumulation")
    assert rows["steps"] == ("13", "derived: 1 epoch x 12.5 steps, rounded up")
    assert rows["epochs"] == ("1", "default: neither steps nor epochs is given")
    assert rows["loss_chunk"][0] == "32"
    assert derived_of(out)["loss chunk"][1].startswith("32 of 32 positions at a time: 384 KiB of logits")


def test_a_class_of_the_users_own(job: str, capsys: Capture) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "reservoir" / "job.yaml"
    assert main(["check", "--all", str(example), "model.options.leak_slow=0.2", "device=cpu", "devices=1"]) == 0
    out = capsys.readouterr().out
    rows = rows_of(out.split("\nderived for ")[0])
    assert rows["model.options.leak_slow"] == ("0.2", "command line")
    assert rows["model.options.leak_fast"] == ("1.0", "default: of Reservoir")
    assert rows["model.vocab"] == ("257", "derived: the tokenizer's")
    assert not {"model.layers", "model.heads"} & set(rows)
    found = derived_of(out)
    assert "attention kernel" not in found
    assert found["method"][0] == "none"
    assert found["trainable"] != found["parameters"], "the recurrent weights of a reservoir do not learn"
    assert main(["check", "--all", str(example), "model.options.leek=1", "device=cpu"]) == 2
    assert "[E-MODEL-009]" in capsys.readouterr().err


def test_a_model_that_does_not_fit_the_mesh_is_told_below_the_values(job: str, capsys: Capture) -> None:
    assert main(["check", "--all", job, "--on", "v5e-8", "model=smollm2-135m", "mesh.tp=2"]) == 2
    out, err = capsys.readouterr()
    assert rows_of(out)["mesh.tp"] == ("2", "command line")
    assert "model's 9 heads" in err


def test_an_unknown_size_needs_no_jax(job: str) -> None:
    program = (
        "import sys; from forerun.cli.main import main; code = main(sys.argv[1:]); print(code, 'jax' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "check", job, "model=qwen3-06b", "--on", "v5e-8"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert ran.stdout.split() == ["2", "False"]
    assert "pretrained weights: model=Qwen/Qwen3-0.6B" in ran.stderr


def test_columns_are_aligned(job: str, capsys: Capture) -> None:
    assert main(["check", "--all", job, "--on", "v6e-1"]) == 0
    config = capsys.readouterr().out.split("\nderived for ")[0]
    lines = [line for line in config.splitlines() if line]
    starts = {match.start() for line in lines if (match := re.search(r"(?<=  )(default: |job\.yaml:)", line))}
    assert len(starts) == 1


def test_the_number_of_devices_may_be_less_than_the_slice_but_not_more(job: str, capsys: Capture) -> None:
    assert main(["check", "--all", job, "--on", "v5e-8", "devices=4"]) == 0
    assert derived_of(capsys.readouterr().out)["mesh"][0] == "1x4x1"
    assert main(["check", "--all", job, "--on", "v5e-8", "devices=16"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "v5e-8 has 8" in err


def test_a_slice_that_does_not_exist_is_told_before_anything_is_printed(job: str, capsys: Capture) -> None:
    assert main(["check", "--all", job, "--on", "v5e-9"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "v5e-9" in err


def test_devices_that_are_here_and_their_warning(job: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.hardware import devices

    device = types.SimpleNamespace(device_kind="cpu")
    asked: list[tuple[object, object]] = []

    def choose(wanted: object, count: object, probe: object = None) -> devices.DeviceChoice:
        asked.append((wanted, count))
        return devices.DeviceChoice(
            platform="cpu", devices=(device, device), reason="the second choice", warning="no TPU, so cpu"
        )

    monkeypatch.setattr(devices, "choose", choose)
    assert main(["check", "--all", job, "device=[tpu,cpu]", "devices=2"]) == 0
    out, err = capsys.readouterr()
    assert asked == [(("tpu", "cpu"), 2)]
    assert "\nderived for this machine\n" in out
    assert derived_of(out)["devices"] == ("2 x cpu", "the second choice")
    assert derived_of(out)["mesh"][0] == "1x2x1"
    assert err.startswith("warning: no TPU, so cpu\n")


def test_steps_follow_from_data_that_is_here(job: str, capsys: Capture) -> None:
    """With bytes as tokens, 100 rows of 32 need 3200 targets: 3200 letters and the end of the document."""
    Path("text.txt").write_text("x" * 3200)
    Path("job.yaml").write_text("model: qwen3-0.6b\ndata: text.txt\nsequence: 32\nbatch: 8\nepochs: 2\n")
    assert main(["check", "--all", job, "--on", "v5e-8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = derived_of(out)
    assert found["steps per epoch"][0] == "12.5"
    assert found["steps"][0] == "25"


def test_data_that_is_nowhere_is_a_mistake_if_it_decides_the_steps(job: str, capsys: Capture) -> None:
    Path("job.yaml").write_text("model: qwen3-0.6b\ndata: text.txt\n")
    assert main(["check", "--all", job, "--on", "v5e-8"]) == 2
    assert "text.txt does not" in capsys.readouterr().err


def test_colours_only_on_a_terminal(job: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def printed() -> str:
        assert main(["check", "--all", job, "--on", "v5e-8", "seed=1", "name=colours"]) == 0
        return capsys.readouterr().out

    plain = printed()
    assert "\033" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((500, 40)))
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = printed()
    assert re.sub(r"\033\[\d+m", "", coloured).split() == plain.split()
    dim = [line for line in coloured.splitlines() if line.startswith("\033[2m")]
    assert len(dim) > 30
    assert all("default: " in line or "from qwen3" in line or "derived: " in line for line in dim)
    assert "\033[1moptimizer\033[0m" in coloured
    assert "\033[36mcommand line\033[0m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in printed()


def test_a_long_value_does_not_push_the_others_away() -> None:
    rows = [Row("a", "x" * 90, "here"), Row("b", "1", "there")]
    text = table([Group("title", rows)], width=None, colour=False)
    assert text.splitlines() == ["title", f"  a  {'x' * 90}", "        here", "  b  1  there"]


def test_long_reasons_are_wrapped_to_the_terminal() -> None:
    rows = [Row("name", "value", "because of this and that and much more of it")]
    text = table([Group("title", rows)], width=40, colour=False)
    assert [line.strip() for line in text.splitlines()] == [
        "title",
        "name  value  because of this and that",
        "and much more of it",
    ]
    assert max(map(len, text.splitlines())) <= 40
    assert text.splitlines()[2].index("and") == text.splitlines()[1].index("because")


def test_without_all_only_what_was_set_and_what_is_derived(job: str, capsys: Capture) -> None:
    words = ["check", job, "--on", "v6e-1", "optimizer.lr=1e-3"]
    assert main(words) == 0
    brief = capsys.readouterr().out
    assert main([*words, "--all"]) == 0
    complete = capsys.readouterr().out
    assert len(brief.splitlines()) < 40 < 100 < len(complete.splitlines())
    rows, every = rows_of(brief), rows_of(complete)
    assert rows["optimizer.lr"] == ("0.001", "command line")
    assert "optimizer.warmup" not in rows
    set_by_user = {name for name, (_, origin) in every.items() if origin.startswith(("job.yaml", "command line"))}
    assert set_by_user <= set(rows)
    assert derived_of(brief) == derived_of(complete)
    hidden = int(re.search(r"^(\d+) more values", brief, re.MULTILINE)[1])  # type: ignore[index]
    assert hidden == count_rows(complete) - count_rows(brief)
    assert main(["check", job, "--on", "v6e-1", "batch=3", "mesh.fsdp=2"]) == 2
    assert "optimizer.warmup" not in capsys.readouterr().out


def count_rows(text: str) -> int:
    """Rows start at the third column; continued lines start farther right."""
    return sum(line.startswith("  ") and line[2] != " " for line in text.splitlines())
