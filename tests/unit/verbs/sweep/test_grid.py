from __future__ import annotations

from pathlib import Path

import pytest
from error_assertions import assert_error

from forerun.errors import UserError
from forerun.verbs.sweep.grid import read_grid, runs_of, split_values

JOB = "model: {layers: 1, embed: 16, heads: 2}\ndata: text\nsteps: 4\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(JOB)
    return tmp_path / "tiny.yaml"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1e-5,3e-5, 1e-4", ["1e-5", "3e-5", "1e-4"]),
        ("[tpu,cpu]", ["[tpu,cpu]"]),
        ("[tpu,cpu],cpu", ["[tpu,cpu]", "cpu"]),
        ("{a: 1, b: [2, 3]},{a: 2, b: []}", ["{a: 1, b: [2, 3]}", "{a: 2, b: []}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("it's,fine", ["it's", "fine"]),
        ("0", ["0"]),
        ("", [""]),
        ("0,,1", ["0", "", "1"]),
    ],
)
def test_commas_separate_values_except_in_brackets_and_quotes(text: str, parts: list[str]) -> None:
    assert split_values(text) == parts


def test_the_product_of_all_values_in_order(path: Path, tmp_path: Path) -> None:
    words = ["optimizer.lr=1e-5,3e-5", "seed=0,1", "batch=4", f"runs={tmp_path}"]
    base, runs = runs_of(path, read_grid(words))
    assert base.job.batch == 4
    found = [(run.job.optimizer.lr, run.job.seed, run.job.batch) for run in runs]
    assert found == [(1e-5, 0, 4), (1e-5, 1, 4), (3e-5, 0, 4), (3e-5, 1, 4)]
    assert [run.name for run in runs][:2] == ["tiny-lr-1e-05-seed-0", "tiny-lr-1e-05-seed-1"]
    assert {run.job.runs for run in runs} == {str(tmp_path / "tiny-sweep")}
    assert runs[2].label == "optimizer.lr=3e-05 seed=0"


def test_keys_that_end_alike_are_written_in_full(path: Path) -> None:
    _, runs = runs_of(path, read_grid(["mesh.data=1,2", "checkpoint.every=5,6", "validation.every=7,8"]))
    assert runs[0].name == "tiny-data-1-checkpoint.every-5-validation.every-7"
    assert [run.job.mesh.data for run in runs] == [1] * 4 + [2] * 4


def test_unusual_and_long_values_have_distinct_folders(path: Path) -> None:
    _, runs = runs_of(path, read_grid(["sample.prompt='a,b',a b,a/b," + "x" * 200, "device=[cpu],cpu"]))
    names = [run.name for run in runs]
    assert [run.job.sample.prompt for run in runs[::2]] == ["a,b", "a b", "a/b", "x" * 200]
    assert [run.job.device for run in runs[:2]] == [("cpu",), "cpu"]
    assert len(set(names)) == 8
    assert all("/" not in name and " " not in name and len(name) < 100 for name in names)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "E-JOB-130"),
        (["seed=0", "device=[tpu,cpu]"], "E-JOB-130"),
        (["seed=0,1", "seed=2,3"], "E-JOB-132"),
        (["seed=0,"], "E-JOB-132"),
        (["optimizer.lr=1e-5,0.00001"], "E-JOB-132"),
        (["name=a,b"], "E-JOB-132"),
        (["runs=a,b"], "E-JOB-132"),
    ],
)
def test_mistakes_in_the_words(words: list[str], code: str) -> None:
    with pytest.raises(UserError) as caught:
        read_grid(words)
    assert_error(caught.value, code)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["seed=0,1", "optimizer.rate=1,2"], "E-JOB-018"),
        (["batch=4,many"], "E-JOB-020"),
        (["seed=" + ",".join(map(str, range(1001)))], "E-JOB-131"),
    ],
)
def test_every_run_is_checked_before_the_first_starts(path: Path, words: list[str], code: str) -> None:
    with pytest.raises(UserError) as caught:
        runs_of(path, read_grid(words))
    assert_error(caught.value, code)
