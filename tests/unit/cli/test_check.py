from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from forerun.cli import check
from forerun.cli.main import main
from forerun.config import keys

Capture = pytest.CaptureFixture[str]
JOB = "model: qwen3-0.6b\ndata: gs://bucket/texts\nsteps: 200\nbatch: 64\n"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    return "job.yaml"


def rows_of(out: str) -> dict[str, tuple[str, str]]:
    """name -> (value, origin), cut at runs of two spaces or more."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines() if line.startswith("  ")]
    return {name: (value, origin) for name, value, origin in lines}


def test_every_key_is_shown_with_value_and_origin(job: str, capsys: Capture) -> None:
    assert main(["check", job, "optimizer.lr=8e-5", "--on", "v5e-8"]) == 0
    out, err = capsys.readouterr()
    assert err == "warning: data.path gs://bucket/texts is not on this machine\n"
    config, derived = out.split("\nderived for ")
    rows = rows_of(config)
    nested = {key for key in keys.leaf_keys() if key.startswith("model.rope_scaling.")}
    assert set(rows) == set(keys.leaf_keys()) - nested | {"model.rope_scaling"}
    assert rows["batch"] == ("64", "job.yaml:4")
    assert rows["data.path"] == ("gs://bucket/texts", "job.yaml:2")
    assert rows["model.name"] == ("qwen3-0.6b", "job.yaml:1")
    assert rows["optimizer.lr"] == ("8.0e-05", "command line")
    assert rows["optimizer.clip"] == ("1.0", "default: 1.0 stops rare spikes")
    assert derived.startswith("v5e-8\n")
    found = rows_of(derived)
    assert found["mesh"][0] == "1x8x1"
    assert found["micro_batch"][0] == "8"
    assert found["effective batch"][0] == "64"
    assert found["warm-up steps"][0] == "6"


def test_columns_are_aligned(job: str, capsys: Capture) -> None:
    assert main(["check", job, "--on", "v6e-1"]) == 0
    config = capsys.readouterr().out.split("\nderived for ")[0]
    lines = [line for line in config.splitlines() if line]
    starts = {match.start() for line in lines if (match := re.search(r"(?<=  )(default: |job\.yaml:)", line))}
    assert len(starts) == 1


def test_the_number_of_devices_may_be_less_than_the_slice_but_not_more(job: str, capsys: Capture) -> None:
    assert main(["check", job, "--on", "v5e-8", "devices=4"]) == 0
    assert rows_of(capsys.readouterr().out.split("\nderived for ")[1])["mesh"][0] == "1x4x1"
    assert main(["check", job, "--on", "v5e-8", "devices=16"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "v5e-8 has 8" in err


def test_a_slice_that_does_not_exist_is_told_before_anything_is_printed(job: str, capsys: Capture) -> None:
    assert main(["check", job, "--on", "v5e-9"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "v5e-9" in err


def test_devices_that_are_here_and_their_warning(job: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.hardware import devices

    asked: list[tuple[object, object]] = []

    def choose(device: object, count: object) -> devices.Chosen:
        asked.append((device, count))
        return devices.Chosen(platform="cpu", devices=(0, 1), reason="the second choice", warning="no TPU, so cpu")

    monkeypatch.setattr(devices, "choose", choose)
    assert main(["check", job, "device=[tpu,cpu]", "devices=2"]) == 0
    out, err = capsys.readouterr()
    assert asked == [(("tpu", "cpu"), 2)]
    assert "derived for this machine: the second choice\n" in out
    assert rows_of(out.split("\nderived for ")[1])["mesh"][0] == "1x2x1"
    assert err.startswith("warning: no TPU, so cpu\n")


def test_steps_follow_from_data_that_is_here(job: str, capsys: Capture) -> None:
    """With bytes as tokens, 100 rows of 32 need 3200 targets: 3200 letters and the end of the document."""
    Path("text.txt").write_text("x" * 3200)
    Path("job.yaml").write_text("model: qwen3-0.6b\ndata: text.txt\nsequence: 32\nbatch: 8\nepochs: 2\n")
    assert main(["check", job, "--on", "v5e-8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = rows_of(out.split("\nderived for ")[1])
    assert found["steps per epoch"][0] == "12.5"
    assert found["steps"][0] == "25"


def test_data_that_is_nowhere_is_a_mistake_if_it_decides_the_steps(job: str, capsys: Capture) -> None:
    Path("job.yaml").write_text("model: qwen3-0.6b\ndata: text.txt\n")
    assert main(["check", job, "--on", "v5e-8"]) == 2
    assert "text.txt does not exist" in capsys.readouterr().err


def test_only_defaults_are_dim_and_only_on_a_terminal(
    job: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed() -> str:
        assert main(["check", job, "--on", "v5e-8"]) == 0
        return capsys.readouterr().out

    assert "\033" not in printed()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = [line for line in printed().splitlines() if "\033" in line]
    assert all("default: " in line and line.startswith("\033[2m") and line.endswith("\033[0m") for line in coloured)
    assert len(coloured) > 30
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in printed()


def test_a_long_value_does_not_push_the_others_away() -> None:
    text = check.table([[check.Row("a", "x" * 90, "here"), check.Row("b", "1", "there")]], colour=False)
    assert len(text.splitlines()[1]) < 50
