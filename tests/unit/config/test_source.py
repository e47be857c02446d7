from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from error_assertions import raises_error

from forerun.config.source import Dumper, flow, read_file, read_value
from forerun.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8e-5", 8e-5),
        ("1E3", 1000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("+3", 3),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("~", None),
        ("null", None),
        ("", None),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2026-11-01", "2026-11-01"),
        ("1.2.3", "1.2.3"),
        ("=", "="),
        ("<<", "<<"),
        ("gs://bucket/x", "gs://bucket/x"),
        ("[tpu, cpu]", ["tpu", "cpu"]),
        ("{a: 1e2, b: [no]}", {"a": 100.0, "b": ["no"]}),
        ("'8e-5'", "8e-5"),
        ('"true"', "true"),
        ("{1: a, true: b}", {"1": "a", "true": "b"}),
    ],
)
def test_scalars_follow_yaml_1_2_core(text: str, value: object) -> None:
    read = read_value(text, "here")
    assert read == value
    assert type(read) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(read_value(".nan", "here"))


def test_every_key_and_item_knows_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("# a job\nmodel: x\noptimizer:\n\n  lr: 1\n  list:\n  - a\n  - b: 2\ninline: {k: 3}\n")
    assert read_file(file).lines == {
        ("model",): 2,
        ("optimizer",): 3,
        ("optimizer", "lr"): 5,
        ("optimizer", "list"): 6,
        ("optimizer", "list", 0): 7,
        ("optimizer", "list", 1): 8,
        ("optimizer", "list", 1, "b"): 8,
        ("inline",): 9,
        ("inline", "k"): 9,
    }


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a' appears twice, first on line 1"),
        ("a:\n  b: 1\n  b: 2\n", 3, "'b' appears twice, first on line 2"),
        ("a: 1\nb: !!python/name:os.system\n", 2, "tag"),
        ("a: 1\nb: !!int '3'\n", 2, "tag"),
        ("a: &x 1\nb: 2\n", 1, "anchors"),
        ("a: 1\nb: *x\n", 2, "anchors"),
        ("a: &a [*a]\n", 1, "anchors"),
        ("a: 1\n\tb: 2\n", 2, "spaces, not tabs"),
        ("a: 1\nb: c: 2\n", 2, "quotes"),
        ("a: 1\nb: 'open\n", 3, "quote"),
        ("a: 1\n---\nb: 1\n", 2, "one document"),
        ("a: 1\n? [x]\n: 2\n", 2, "key is a list"),
        ("a: 1\nb: \x07\n", 2, "character"),
        (f"a: {'9' * 5000}\n", 1, "5000 digits"),
        ("- a\n", 1, "not a job"),
        ("just text\n", 1, "not a job"),
    ],
)
def test_refused_texts_name_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_file(file)
    assert f"{file}:{line}" in caught.value.why
    assert words in str(caught.value)


def test_bytes_that_are_not_utf8_and_empty_files_are_users_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"name: \xff\xfe\n")
    with raises_error("E-JOB-011", "UTF-8"):
        read_file(file)
    file.write_text("# nothing\n")
    with raises_error("E-JOB-009"):
        read_file(file)
    file.write_bytes("\ufeffname: ä\n".encode())
    assert read_file(file).tree == {"name": "ä"}


def test_depth_has_an_end(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("a: " + "[" * 5000 + "]" * 5000)
    with raises_error("E-JOB-017"):
        read_file(file)


def test_a_missing_file_suggests_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("a: 1")
    with pytest.raises(UserError) as caught:
        read_file(tmp_path / "quikstart.yaml")
    assert caught.value.fix == f"did you mean '{tmp_path / 'quickstart.yaml'}'?"
    with pytest.raises(UserError) as caught:
        read_file(tmp_path / "quickstart")
    assert "quickstart.yaml" in caught.value.fix
    with raises_error("E-JOB-013"):
        read_file(tmp_path)
    with pytest.raises(UserError) as caught:
        read_file(tmp_path / "nowhere" / "job.yaml")
    assert f"{tmp_path / 'nowhere'} does not exist" in caught.value.why


@pytest.mark.parametrize(
    "value", ["8e-5", "no", "1e3", "0o7", "null", "", " x", "a: b", "# c", 8e-5, 1e22, -1, True, None]
)
def test_what_is_written_reads_back_the_same(value: object) -> None:
    for text in (flow(value), yaml.dump(value, Dumper=Dumper)):
        read = read_value(text, "here")
        assert read == value
        assert type(read) is type(value)


def test_what_is_written_is_plain_yaml_to_others_too() -> None:
    """PyYAML's own loader speaks YAML 1.1; numbers must still be numbers there."""
    assert yaml.safe_load(flow({"lr": 8e-5, "eps": 1e-8, "n": 3})) == {"lr": 8e-5, "eps": 1e-8, "n": 3}


@pytest.mark.parametrize(
    "value", ["a\nb", "\n", "{q}\n\n{a}", [{"role": "user", "content": "{q}\n"}], "plain", ["a", 1]]
)
def test_a_value_with_line_ends_is_shown_on_one_line_and_read_back(value: object) -> None:
    shown = flow(value)
    assert "\n" not in shown
    assert read_value(shown, "here") == value
