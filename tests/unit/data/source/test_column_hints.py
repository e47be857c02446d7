"""Small files as users write them. Each is read as meant, either directly or after the fix of the error is applied."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from forerun.config.load import load
from forerun.config.schema import Part
from forerun.data.corpus import Corpus, Dialect, open_corpus
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import ByteTokenizer
from forerun.errors import UserError

END = 256
Rows = list[dict[str, Any]]
CHATML_USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ASK, TELL = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)


class Example(NamedTuple):
    """A file, and the training example that its author means: `prompt` without loss, `answer` with loss.

    `codes` are the errors whose fixes are applied one after another. `name` is the column that the user writes in place
    of NAME, where a fix has it.
    """

    file: str
    content: Rows | str
    prompt: str
    answer: str
    codes: tuple[str, ...] = ()
    name: str = ""
    overrides: tuple[str, ...] = ()


PAIR, NONE = "E-DATA-225", "E-DATA-024"
CASES = {
    "text": Example("a.jsonl", [{"text": "T"}], "", "T"),
    "plain text": Example("a.txt", "T", "", "T"),
    "one column of another name": Example("a.jsonl", [{"story": "T", "lang": "en"}], "", "T", (NONE,)),
    "one unknown column": Example("a.csv", [{"line": "T"}], "", "T", (NONE,)),
    "misspelled text": Example("a.jsonl", [{"txet": "T"}], "", "T", (NONE,)),
    "prompt and completion": Example("a.csv", [{"prompt": "Q", "completion": "A"}], "Q", "A"),
    "prompt and answer": Example("a.csv", [{"prompt": "Q", "answer": "A"}], "Q", "A"),
    "capital letters": Example("a.csv", [{"Question": "Q", "Answer": "A"}], "Q", "A"),
    "question and answer, tsv": Example("a.tsv", [{"question": "Q", "answer": "A"}], "Q", "A"),
    "question, answer and metadata": Example(
        "a.jsonl", [{"id": 1, "question": "Q", "answer": "A", "topic": "t"}], "Q", "A"
    ),
    "instruction and response": Example("a.parquet", [{"instruction": "Q", "response": "A"}], "Q", "A"),
    "input and output": Example("a.jsonl", [{"input": "Q", "output": "A"}], "Q", "A"),
    "input and target": Example("a.parquet", [{"input": "Q", "target": "A"}], "Q", "A"),
    "source and target": Example("a.tsv", [{"source": "Q", "target": "A"}], "Q", "A"),
    "problem and solution": Example("a.jsonl", [{"problem": "Q", "solution": "A"}], "Q", "A"),
    "words before the names": Example("a.jsonl", [{"user_question": "Q", "expected_output": "A"}], "Q", "A"),
    "question and unknown partner": Example("a.csv", [{"question": "Q", "reply": "A"}], "Q", "A", (PAIR,)),
    "answer and unknown partner": Example("a.csv", [{"id": 1, "promt": "Q", "answer": "A"}], "Q", "A", (PAIR,)),
    "question and two unknown": Example(
        "a.csv", [{"question": "Q", "reply": "A", "remark": "R"}], "Q", "A", (PAIR,), "reply"
    ),
    "two unknown columns": Example("a.csv", [{"said by user": "T", "remark": "R"}], "", "T", (NONE,), '"said by user"'),
    "two answers": Example("a.jsonl", [{"question": "Q", "solution": "A", "answer": "B"}], "Q", "A", (PAIR,)),
    "context": Example("a.csv", [{"context": "C", "question": "Q", "answer": "A"}], "C\nQ", "A", (PAIR,)),
    "thoughts": Example(
        "a.jsonl", [{"question": "Q", "reasoning": "R", "answer": "A"}], "Q", "<think>R</think>A", (PAIR,)
    ),
    "system": Example(
        "a.jsonl",
        [{"system": "S", "instruction": "Q", "response": "A"}],
        "<|im_start|>system\nS<|im_end|>\n" + CHATML_USER.format("Q"),
        "A<|im_end|>",
        (PAIR, "E-DATA-009"),
    ),
    "alpaca": Example(
        "a.jsonl", [{"instruction": "Q", "input": "I", "output": "A"}], ALPACA_INPUT.format("Q", "I"), "A"
    ),
    "alpaca without input": Example(
        "a.jsonl", [{"instruction": "Q", "input": "", "output": "A"}], ALPACA.format("Q"), "A"
    ),
    "alpaca with response": Example(
        "a.csv", [{"instruction": "Q", "input": "I", "response": "A"}], ALPACA_INPUT.format("Q", "I"), "A"
    ),
    "dolly": Example(
        "a.jsonl",
        [{"instruction": "Q", "context": "", "response": "A", "category": "qa"}],
        ALPACA.format("Q"),
        "A",
        (PAIR,),
    ),
    "chat": Example("a.jsonl", [{"messages": [ASK, TELL]}], CHATML_USER.format("Q"), "A<|im_end|>", ("E-DATA-009",)),
    "chat of another name": Example(
        "a.parquet", [{"chat": [ASK, TELL]}], CHATML_USER.format("Q"), "A<|im_end|>", (NONE, "E-DATA-009")
    ),
    "ShareGPT": Example(
        "a.jsonl",
        [{"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}],
        CHATML_USER.format("Q"),
        "A<|im_end|>",
        ("E-DATA-009",),
    ),
    "a JSON list": Example("a.json", '[{"question": "Q", "answer": "A"}]', "Q", "A", ("E-DATA-041",)),
    "a JSON list on many lines": Example(
        "a.json", json.dumps([{"question": "Q", "answer": "A"}], indent=1), "Q", "A", ("E-DATA-042",)
    ),
    "preferences, without a method": Example(
        "a.jsonl", [{"prompt": "Q", "chosen": "A", "rejected": "B"}], "Q", "A", ("E-DATA-004",)
    ),
    "answers named as text": Example(
        "a.csv", [{"prompt": "Q", "answer": "A"}], "Q", "A", ("E-DATA-224",), overrides=("data.columns.text=answer",)
    ),
    "only the prompt is named": Example(
        "a.csv", [{"ask": "Q", "answer": "A"}], "Q", "A", (NONE,), overrides=("data.columns.prompt=ask",)
    ),
    "only the answer is named": Example(
        "a.csv", [{"question": "Q", "tell": "A"}], "Q", "A", (NONE,), overrides=("data.columns.completion=tell",)
    ),
    "a named column is misspelled": Example(
        "a.csv",
        [{"question": "Q", "answer": "A"}],
        "Q",
        "A",
        (NONE,),
        overrides=("data.columns.prompt=qestion", "data.columns.completion=answer"),
    ),
    "names that YAML reads as other values": Example(
        "a.csv", [{"question {1}": "Q", "yes": "A", "it's": "B"}], "", "A", (NONE,), '"yes"'
    ),
}


def write_file(path: Path, content: Rows | str) -> None:
    if isinstance(content, str):
        path.write_text(content)
    elif path.suffix in (".csv", ".tsv"):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(content[0]), delimiter="," if path.suffix == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(content)
        path.write_text(text.getvalue())
    elif path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (the data extra)")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(content), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content))


def apply_fix(fix: str, overrides: list[str], name: str) -> None:
    """Do what a fix says: convert the file, and change the overrides."""
    if command := re.search(r"jq -c '\.\[\]' (\S+) > (\S+)", fix):
        rows = json.loads(Path(command[1]).read_text())
        write_file(Path(command[2]), rows)
    for key in re.findall(r"remove (data\.[\w.]+)", fix):
        overrides[:] = [one for one in overrides if not one.startswith(f"{key}=")]
    # A fix may name an alternative after a semicolon, which is not applied.
    alternative = fix.partition("; ")[0] if "; to " in fix or "; NAME" in fix else fix
    alternative = alternative.partition(", or ")[0]
    proposed = re.findall(r"'data\.(?:[^']|'\"'\"')*'|data\.[\w.]+=[^\s;,()?]+", alternative)
    new = [word.replace("NAME", name) for word in (shlex.split(one)[0] for one in proposed)]
    keys = {one.partition("=")[0] for one in new}
    overrides[:] = [one for one in overrides if one.partition("=")[0] not in keys] + new


def corpus_of(folder: Path, path: str, overrides: list[str]) -> Corpus:
    job = {"name": "a", "model": {"layers": 1, "embed": 8, "heads": 1}, "data": {"path": path}, "sequence": 64}
    (folder / "job.yaml").write_text(yaml.safe_dump(job | {"batch": 1, "steps": 1}))
    loaded = load(folder / "job.yaml", overrides).job
    return open_corpus(loaded.data, Dialect(ByteTokenizer()), sequence=1024)


def first_example(corpus: Corpus) -> tuple[str, str]:
    """Return the text without loss and the text with loss of the first document, without its end token."""
    documents = corpus.parts[0].store.train
    begin, end = documents.begins([0, 1])
    tokens, learned = documents.read(int(begin), int(end))
    mask = [True] * len(tokens) if learned is None else learned.tolist()
    pairs = [(token, has_loss) for token, has_loss in zip(tokens.tolist(), mask, strict=True) if token != END]
    first = next((at for at, (_, has_loss) in enumerate(pairs) if has_loss), len(pairs))
    assert all(has_loss for _, has_loss in pairs[first:-1])  # a template may end with a newline without loss
    texts = ([token for token, has_loss in pairs if has_loss is value] for value in (False, True))
    prompt, answer = (bytes(text).decode() for text in texts)
    return (prompt.removesuffix("\n") if answer.endswith("<|im_end|>") and not pairs[-1][1] else prompt), answer


@pytest.mark.parametrize("case", CASES)
def test_files_are_read_as_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    example = CASES[case]
    monkeypatch.chdir(tmp_path)  # where a converted file is written
    path = tmp_path / example.file
    write_file(path, example.content)
    overrides = list(example.overrides)
    for code in example.codes:
        with pytest.raises(UserError) as caught:
            corpus_of(tmp_path, str(path), overrides)
        assert caught.value.code == code
        apply_fix(caught.value.fix, overrides, example.name)
    corpus = corpus_of(tmp_path, str(path), overrides)
    assert first_example(corpus) == (example.prompt, example.answer)
    assert not corpus.parts[0].source.unused_prompts


@pytest.mark.parametrize(
    ("row", "overrides", "unused"),
    [
        ({"text": "T", "prompt": "Q"}, [], ["prompt"]),
        ({"text": "T", "question": "Q", "answer": "A"}, [], ["question"]),
        ({"prompt": "Q", "completion": "A", "input": "I"}, [], ["input"]),
        ({"question": "Q", "reply": "A"}, ["data.columns.text=reply"], ["question"]),
        ({"prompt": "Q", "text": "A"}, ["data.columns.text=text"], ["prompt"]),
        ({"text": "T", "id": 1, "answer": "A"}, [], []),
    ],
)
def test_an_unused_prompt_is_a_warning(
    tmp_path: Path, row: dict[str, Any], overrides: list[str], unused: list[str]
) -> None:
    write_file(tmp_path / "a.jsonl", [row])
    corpus = corpus_of(tmp_path, str(tmp_path / "a.jsonl"), overrides)
    assert corpus.parts[0].source.unused_prompts == unused
    assert len(corpus.warnings) == bool(unused)
    assert all(name in corpus.warnings[0] for name in unused)


def test_a_template_trains_on_answers_alone(tmp_path: Path) -> None:
    """The error for answers that are read as text names the template that asks for it."""
    write_file(tmp_path / "a.csv", [{"prompt": "Q", "answer": "A"}])
    with pytest.raises(UserError) as caught:
        corpus_of(tmp_path, str(tmp_path / "a.csv"), ["data.columns.text=answer"])
    assert caught.value.code == "E-DATA-224"
    (override,) = shlex.split(caught.value.fix.rpartition("template: ")[2])
    assert first_example(corpus_of(tmp_path, str(tmp_path / "a.csv"), [override])) == ("", "A")


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "Q", "chosen": "A", "rejected": "B"}, "question"),
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "prompt"),
        ({"id": 1, "chosen": "Q A", "rejected": "Q B"}, None),
    ],
)
def test_preference_pairs_keep_their_prompt(tmp_path: Path, row: dict[str, Any], prompt: str | None) -> None:
    write_file(tmp_path / "a.jsonl", [row])
    source = open_source(Part(path=str(tmp_path / "a.jsonl")))
    (found,) = source.rows(source.pieces(1 << 20)[0])
    assert source.form == "chosen/rejected"
    assert found.values.get("prompt") == (row[prompt] if prompt else None)  # type: ignore[union-attr]


def test_parts_of_the_prompt_of_preference_pairs_are_named(tmp_path: Path) -> None:
    row = {"instruction": "Q", "input": "I", "chosen": "A", "rejected": "B"}
    write_file(tmp_path / "a.jsonl", [row])
    overrides: list[str] = []
    with pytest.raises(UserError) as caught:
        corpus_of(tmp_path, str(tmp_path / "a.jsonl"), overrides)
    assert caught.value.code == "E-DATA-225"
    apply_fix(caught.value.fix, overrides, "")
    data = load(tmp_path / "job.yaml", overrides).job.data
    source = open_source(data)
    (found,) = source.rows(source.pieces(1 << 20)[0])
    assert found.values == {"chosen": "A", "rejected": "B", "prompt": "Q\nI"}  # type: ignore[union-attr]


def test_a_file_without_a_header_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("2 + 2?,4\n3 + 3?,6\n")
    with pytest.raises(UserError) as caught:
        corpus_of(tmp_path, str(tmp_path / "a.csv"), [])
    header = caught.value.fix.rpartition("header, such as ")[2]
    (tmp_path / "a.csv").write_text(f"{header}\n2 + 2?,4\n3 + 3?,6\n")
    assert first_example(corpus_of(tmp_path, str(tmp_path / "a.csv"), [])) == ("2 + 2?", "4")
