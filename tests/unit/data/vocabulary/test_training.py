"""Training of tokenizers: the merges of the library, the files that transformers reads, and the report."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from error_assertions import assert_error
from recording_reporter import RecordingReporter
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

import forerun as fr
from forerun.cli.main import main
from forerun.config.schema import Data
from forerun.data.tokenizer import load_tokenizer
from forerun.data.tokens.recipe import is_validation
from forerun.data.vocabulary.texts import BLOCK_CHARACTERS, HELD_OUT, blocks, open_texts
from forerun.errors import UserError
from forerun.exit_codes import USER_MISTAKE
from forerun.hub.chat.template import CHATML, render

SIZE = 310
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# As Qwen2's tokenizer.json has it, copied by hand.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DOCUMENTS = [
    f"Chapter {n}: the gardener's {n * 7} apples, {n % 5} pears — and naïve café owners.\n\nIt's raining; 東京 {n}!"
    for n in range(300)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents as text with separators and as JSONL, and a tokenizer that was trained on each."""
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in DOCUMENTS))
    (folder / "texts.txt").write_text("<SEP>".join(DOCUMENTS))
    (folder / "job.yaml").write_text(
        "model: {layers: 1, embed: 16, heads: 2}\ndata: {path: texts.txt, separator: <SEP>}\n"
    )
    fr.train_tokenizer(folder / "texts.jsonl", folder / "one", vocab=SIZE, progress=False)
    return folder


def training_texts() -> list[str]:
    return [text for text in DOCUMENTS if not is_validation({"text": text}, HELD_OUT)]


def reference() -> tokenizers.Tokenizer:
    """The library used directly."""
    made = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN2), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, min_frequency=2, special_tokens=[AddedToken(one, special=True) for one in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(training_texts(), trainer)
    return made


def test_the_tokenizer_is_that_of_the_library(place: Path) -> None:
    ours = json.loads((place / "one" / "tokenizer.json").read_text())
    theirs = json.loads(reference().to_str())
    assert len(ours["model"]["merges"]) == SIZE - 256 - len(SPECIALS)
    assert ours == theirs


def test_the_same_text_gives_the_same_files(place: Path) -> None:
    from_job = fr.train_tokenizer(place / "job.yaml", place / "two", vocab=SIZE, progress=False)
    again = fr.train_tokenizer([place / "texts.jsonl"], place / "three", vocab=SIZE, progress=False)
    assert from_job.sha256 == again.sha256
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        contents = {(place / folder / name).read_bytes() for folder in ("one", "two", "three")}
        assert len(contents) == 1


def test_the_settings_change_the_splitting(place: Path) -> None:
    text = "In 2024 it's 日本"
    ids = {}
    for split in ("qwen2", "llama3", "gpt2"):
        made = fr.train_tokenizer(
            place / "texts.jsonl", place / split, vocab=SIZE, splitting=split, normalize="nfc", chat_template=None,
            end="<end>", special=["<tool>"], progress=False,
        )  # fmt: skip
        assert not (place / split / "chat_template.jinja").exists()
        found = load_tokenizer(str(place / split))
        assert (found.eos, dict(found.specials)) == (0, {"<end>": 0, "<tool>": 1})
        assert found.decode(found.encode("cafe\u0301 " + text)) == "caf\u00e9 " + text
        ids[split] = made.sha256
    assert len(set(ids.values())) == 3
    inner = tokenizers.Tokenizer.from_file(str(place / "qwen2" / "tokenizer.json"))
    words = [text for text, _ in inner.pre_tokenizer.pre_tokenize_str("x 2024")]
    assert words == ["x", "Ġ", "2", "0", "2", "4"]


@pytest.mark.torch
def test_transformers_loads_it_with_the_same_ids_and_template(place: Path) -> None:
    import transformers

    theirs: Any = transformers.AutoTokenizer.from_pretrained(place / "one")
    ours = load_tokenizer(str(place / "one"))
    library = tokenizers.Tokenizer.from_file(str(place / "one" / "tokenizer.json"))
    for text in (*DOCUMENTS[:3], "<|im_start|>user\n x<|im_end|>", "\t\r\n  \u200d😀 12345", ""):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token == "<|endoftext|>"
    assert theirs.eos_token_id == ours.eos
    assert len(theirs) == ours.vocab == SIZE
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    assert theirs.apply_chat_template(chat, tokenize=False) == render(CHATML, chat, special={}, prompt=False)


def test_the_report_counts_as_the_library_does(place: Path, tmp_path: Path) -> None:
    report = fr.inspect_tokenizer(place / "one", place / "texts.jsonl", compare=[str(place / "one")])
    own, single_bytes = report.tokenizers
    made = reference()
    used: Counter[int] = Counter()
    for held, figures in ((False, own.train), (True, own.held_out)):
        texts = [text for text in DOCUMENTS if is_validation({"text": text}, HELD_OUT) is held]
        ids = [made.encode(text).ids for text in texts]
        used.update(token for one in ids for token in one)
        assert figures.bytes == sum(len(text.encode()) for text in texts)
        assert figures.tokens == sum(map(len, ids))
        assert figures.words == sum(len(text.split()) for text in texts)
        assert figures.bytes_per_token == pytest.approx(figures.bytes / figures.tokens)
    assert own.held_out.bytes > 0
    assert own.unused == SIZE - 3 - len(used)
    assert own.unused_share == pytest.approx(own.unused / (SIZE - 3))
    assert single_bytes.train.bytes_per_token == 1.0
    longest = max((text for text in made.get_vocab() if text not in SPECIALS), key=len)
    assert report.longest[0].replace(" ", "Ġ") == longest
    assert report.example.replace("|", "").startswith("Chapter")
    assert report.example.count("|") >= 10


def test_conversations_and_pairs_have_text(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat))
    (tmp_path / "ask.jsonl").write_text(json.dumps({"prompt": "three", "completion": "four"}))
    pair = {"prompt": chat["messages"][:1], "chosen": chat["messages"][1:], "rejected": "no"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps({**pair, "rejected": chat["messages"][1:]}))
    for name, wanted in (("chat", "one two"), ("ask", "three four"), ("pairs", "one two two")):
        data = Data(path=str(tmp_path / f"{name}.jsonl"))
        assert sorted(text for text, _ in open_texts(data).texts()) == sorted(wanted.split()), name


def test_long_texts_are_divided_at_lines_or_spaces() -> None:
    lines = "".join(f"line {n}\n" for n in range(4000))
    found = list(blocks(lines))
    assert "".join(found) == lines
    assert len(found) > 3
    assert all(block.endswith("\n") and len(block) < BLOCK_CHARACTERS + 20 for block in found)
    assert [block[0] for block in blocks("word " * 4000)] == ["w", *[" "] * 4]
    assert [len(block) for block in blocks("x" * (BLOCK_CHARACTERS + 1))] == [BLOCK_CHARACTERS, 1]


def test_progress_reaches_the_end(place: Path) -> None:
    texts = open_texts(Data(path=str(place / "texts.jsonl")))
    reporter = RecordingReporter()
    assert len(list(texts.texts(reporter))) == len(DOCUMENTS)
    assert reporter.updates == sorted(reporter.updates)
    assert reporter.updates[-1] == (1, 1)  # MiB of text


def test_mistakes_are_reported_before_the_training(place: Path, tmp_path: Path) -> None:
    text, to = place / "texts.jsonl", tmp_path / "new"
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2]}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": 3}\n')
    (tmp_path / "job.yaml").write_text(
        "model: {layers: 1, embed: 16, heads: 2}\ndata: {path: bad.jsonl, bad_rows: 0.1}\n"
    )
    mistakes: list[tuple[str, Any, dict[str, Any]]] = [
        ("E-DATA-141", tmp_path / "ids.jsonl", {}),
        ("E-DATA-142", tmp_path / "job.yaml", {"vocab": 300}),
        ("E-DATA-143", text, {"special": ["<|endoftext|>"]}),
        ("E-DATA-144", text, {"vocab": 258}),
        ("E-DATA-002", text, {"chat_template": str(tmp_path / "absent.jinja")}),
        ("E-COMMAND-030", text, {"splitting": "words"}),
        ("E-DATA-077", text, {"compare": [str(tmp_path / "absent")]}),
    ]
    for code, data, settings in mistakes:
        with pytest.raises(UserError) as refused:
            fr.train_tokenizer(data, to, progress=False, **settings)
        assert_error(refused.value, code)
        assert not to.exists()
    with pytest.raises(UserError) as refused:
        fr.train_tokenizer(text, place / "one", progress=False)
    assert_error(refused.value, "E-DATA-145", what=str(place / "one"))


def test_the_command_trains_and_shows(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    assert main(["tokenizer", "train", "texts.jsonl", "--vocab", str(SIZE), "--to", "cli/"]) == 0
    printed = capsys.readouterr()
    assert (place / "cli" / "tokenizer.json").read_bytes() == (place / "one" / "tokenizer.json").read_bytes()
    assert f"{SIZE} tokens" in printed.out
    assert "MiB of text" in printed.err
    assert main(["tokenizer", "show", "cli", "texts.jsonl", "--compare", "one"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[:1] == printed.out.splitlines()[:1]
    for arguments, code in (
        (["train", "texts.jsonl"], "E-COMMAND-031"),
        (["show", "cli"], "E-COMMAND-032"),
        (["show", "cli", "texts.jsonl", "--vocab", "9"], "E-COMMAND-033"),
    ):
        assert main(["tokenizer", *arguments]) == USER_MISTAKE
        assert code in capsys.readouterr().err


def test_text_that_is_too_short_is_reported(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc abc\n")
    made = fr.train_tokenizer(tmp_path / "short.txt", tmp_path / "tok", vocab=300, progress=False)
    assert made.vocabulary < 300
    assert str(made.vocabulary) in made.warnings[0]
    assert made.report.tokenizers[0].held_out.bytes == 0
