"""`generate` and `chat` with a tiny random model in the place of a loaded one. Bytes are its tokens."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.main import main
from forerun.generate.engine import Engine
from forerun.hardware.mesh import MeshShape
from forerun.reporter import LineReporter

Capture = pytest.CaptureFixture[str]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
COLD = ["--temperature", "0", "--dtype", "float32"]


@cache
def parts() -> dict[str, Any]:
    import jax

    from forerun.models.decoder import Decoder
    from forerun.models.decoder_config import DecoderConfig
    from forerun.nn import spec
    from forerun.nn.compute import Compute
    from forerun.program.build import make_mesh

    model = Decoder(DecoderConfig(1, 16, 2, 1, 8, 32, 264))
    params = jax.tree.map(lambda x: x if x.ndim < 2 else x * 15, spec.initial(model.specs(), jax.random.key(1)))
    mesh = make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])
    return {"model": model, "params": params, "mesh": mesh, "compute": Compute()}


class Letters:
    """Bytes, kept to letters a to z so that random text can be read and searched."""

    name, vocab, eos = "letters", 26, 300
    ends = frozenset({300})
    specials: dict[str, int] = {}  # noqa: RUF012

    def encode(self, text: str) -> list[int]:
        return [byte % 26 for byte in text.encode()]

    encode_prompt = encode

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + token) for token in ids)


@cache
def engine() -> Any:
    """One for all tests: each would compile the same programs again."""
    return Engine(**parts(), eos=Letters.ends, vocab=Letters.vocab)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts the tiny model in the place of every source, and notes what was asked for."""
    calls: list[dict[str, Any]] = []

    def load_model(source: str, **wanted: Any) -> Any:
        calls.append({"source": source} | wanted)
        template = None if "plain" in source else TEMPLATE
        return types.SimpleNamespace(
            name=source,
            tokenizer=Letters(),
            eos=Letters.ends,
            chat_template=template,
            special={},
            template_origin=None,
            turn_stop=(),
            special_tokens=False,
            step=None,
            **parts(),
        )

    monkeypatch.setattr("forerun.trained_model.load_model.load_model", load_model)
    monkeypatch.setattr("forerun.run.compile_step.use_cache", lambda: None)
    monkeypatch.setattr("forerun.generate.engine.Engine", lambda *_, **__: engine())
    return calls


def generate(words: list[str], capsys: Capture) -> str:
    assert main(["generate", "tiny", *words, *COLD]) == 0
    return capsys.readouterr().out


def test_one_prompt(asked: list[dict[str, Any]], capsys: Capture) -> None:
    text = generate(["Once", "--max-tokens", "30", "--devices", "1", "--mesh", "1x1x1"], capsys)
    assert (len(text), text[-1]) == (31, "\n")
    assert len(set(text)) > 5
    assert isinstance(asked[0].pop("reporter"), LineReporter)
    assert asked == [
        {
            "source": "tiny",
            "revision": None,
            "device": "auto",
            "devices": 1,
            "mesh": MeshShape(1, 1, 1),
            "dtype": "float32",
            "code": None,
        }
    ]
    assert generate(["Once", "--max-tokens", "10"], capsys) == text[:10] + "\n"
    assert (
        generate(["Once", "--max-tokens", "30", "--stop", text[7:10]], capsys) == text[: text.find(text[7:10])] + "\n"
    )


def test_sampling_by_seed(asked: list[dict[str, Any]], capsys: Capture) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["generate", "tiny", "Once", "--max-tokens", "20", "--top-k", "20", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_file_of_prompts_and_messages(asked: list[dict[str, Any]], tmp_path: Path, capsys: Capture) -> None:
    questions = [{"prompt": f"No {n}"} for n in range(4)] + [{"messages": [{"role": "user", "content": "Hi ü"}]}]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, questions)) + "\n")
    words = ["--batch", str(file), "--max-tokens", "12", "--rows", "2"]
    answers = [json.loads(line) for line in generate(words, capsys).splitlines()]
    singles = [generate([q["prompt"], "--max-tokens", "12"], capsys) for q in questions[:4]]
    singles.append(generate(["[user]Hi ü[a]", "--max-tokens", "12"], capsys))
    assert answers == [
        q | {"text": text[:-1], "tokens": 12, "finish": "length"} for q, text in zip(questions, singles, strict=True)
    ]

    generate([*words, "--out", str(out)], capsys)
    whole = out.read_bytes()
    assert [json.loads(line) for line in whole.splitlines()] == answers
    out.write_bytes(whole[: whole.index(b"\n") + 20])  # killed while the second line was written
    generate([*words, "--out", str(out)], capsys)
    assert out.read_bytes() == whole
    loaded = len(asked)
    generate([*words, "--out", str(out)], capsys)
    assert len(asked) == loaded, "nothing is loaded for nothing"


def test_progress_says_how_long(asked: list[dict[str, Any]], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n' * 3)
    assert main(["generate", "tiny", "--batch", str(file), "--rows", "2", "--max-tokens", "4", *COLD]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines[-2:]] == ["2/3 answers", "3/3 answers"]
    assert re.fullmatch(r"2/3 answers, \d+ tokens/s, eta [\d.]+ m?s", lines[-2])
    assert re.fullmatch(r"3/3 answers, \d+ tokens/s, [\d.]+ m?s", lines[-1])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "it is not JSON"),
        ("[]", "not an object with either a prompt or messages"),
        ('{"prompt": 3}', "its prompt is not text"),
        ('{"prompt": "a", "messages": []}', "either a prompt or messages"),
        ('{"messages": []}', "not a list of objects"),
        ('{"messages": [{"role": "user"}]}', "not a list of objects"),
    ],
)
def test_lines_that_are_no_question(line: str, why: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert main(["generate", "tiny", "--batch", str(file)]) == 2
    err = capsys.readouterr().err
    assert f"{file}, line 2 is no question" in err
    assert why in err


def test_an_output_of_other_questions_is_not_touched(
    asked: list[dict[str, Any]], tmp_path: Path, capsys: Capture
) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "a"}\n')
    for content in ('{"prompt": "b", "text": "x"}\n', "my diary\n", '{"prompt": "a"}\n'):
        out.write_text(content)
        assert main(["generate", "tiny", "--batch", str(file), "--out", str(out)]) == 2
        assert "answer line 1" in capsys.readouterr().err
        assert out.read_text() == content


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "forerun generate needs a prompt"),
        (["a", "--batch", "x.jsonl"], "a prompt and --batch were both given"),
        (["a", "--out", "x.jsonl"], "--out is for --batch"),
        (["--batch", "nowhere.jsonl"], "--batch nowhere.jsonl cannot be read"),
        (["a", "--mesh", "2x2"], "--mesh 2x2 is not a mesh"),
        (["a", "--temperature", "-1"], "temperature -1.0 cannot be used"),
        (["a", "--top-p", "3"], "top-p 3.0 is not a probability"),
        (["a", "--max-tokens", "0"], "forerun generate: argument --max-tokens: '0' is not a number from 1 on"),
        ([""], "the prompt is empty"),
    ],
)
def test_mistakes(words: list[str], what: str, asked: list[dict[str, Any]], capsys: Capture) -> None:
    assert main(["generate", "tiny", *words]) == 2
    err = capsys.readouterr().err
    assert f"error: {what}" in err


def talk(lines: list[str | type[BaseException]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plays a person at the terminal; an exception in place of a line is Ctrl-C or Ctrl-D."""
    waiting = iter(lines)

    def answer(prompt: str = "") -> str:
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer)
    return []


def test_a_conversation(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    short = ["--max-tokens", "8"]
    talk(["Hello", KeyboardInterrupt, "", "More", "/reset", "Hello"], monkeypatch)
    assert main(["chat", "tiny", "--system", "Be kind", *short, *COLD]) == 0
    first, second, again = capsys.readouterr().out.splitlines()
    start = "[system]Be kind[user]Hello[a]"
    assert generate([start, *short], capsys) == first + "\n"
    assert again == first
    follow = f"[system]Be kind[user]Hello[assistant]{first}[user]More[a]"
    assert generate([follow, *short], capsys) == second + "\n"


def test_ctrl_c_stops_the_answer_and_not_the_conversation(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from forerun.generate.stream import TextGeneration

    whole = TextGeneration.__iter__

    def interrupted(self: TextGeneration) -> Iterator[tuple[int, str]]:
        for number, piece in enumerate(whole(self)):
            yield piece
            if number == 2:
                monkeypatch.setattr(TextGeneration, "__iter__", whole)
                raise KeyboardInterrupt

    monkeypatch.setattr(TextGeneration, "__iter__", interrupted)
    talk(["Hello", "More"], monkeypatch)
    assert main(["chat", "tiny", "--max-tokens", "8", *COLD]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert (len(first), first[3:]) == (7, " ...")
    follow = f"[user]Hello[assistant]{first[:3]}[user]More[a]"
    assert generate([follow, "--max-tokens", "8"], capsys) == second + "\n"


def test_a_model_without_a_template_does_not_chat(asked: list[dict[str, Any]], capsys: Capture) -> None:
    assert main(["chat", "plain-model"]) == 2
    assert "[E-COMMAND-021]" in capsys.readouterr().err


def test_commands_are_not_sent_to_the_model(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    short = ["--max-tokens", "8", *COLD]
    for leave in ("/exit", "/quit"):
        talk(["/help", "/nonsense", "Hello", leave, "never read"], monkeypatch)
        assert main(["chat", "tiny", *short]) == 0
        said = capsys.readouterr()
        assert len(said.out.splitlines()) == 1
        assert said.out == generate(["[user]Hello[a]", "--max-tokens", "8"], capsys)
        assert said.err.count("/reset") == 2
        assert "/nonsense" in said.err
    talk(["/usr/bin is a folder", "/reset", "//help"], monkeypatch)
    assert main(["chat", "tiny", *short]) == 0
    path, escaped = capsys.readouterr().out.splitlines(keepends=True)
    assert path == generate(["[user]/usr/bin is a folder[a]", "--max-tokens", "8"], capsys)
    assert escaped == generate(["[user]/help[a]", "--max-tokens", "8"], capsys)


def test_a_turn_ends_at_its_text_in_messages_alone(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    whole = generate(["[user]Hi[a]", "--max-tokens", "12"], capsys).strip()
    monkeypatch.setattr("forerun.verbs.language_model.LanguageModel.turn_stop", (whole[4:7],))
    file = tmp_path / "in.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "[user]Hi[a]"}) + "\n")
    lines = generate(["--batch", str(file), "--max-tokens", "12"], capsys).splitlines()
    found = [(answer["text"], answer["finish"]) for answer in map(json.loads, lines)]
    assert found == [(whole[: whole.find(whole[4:7])], "stop"), (whole, "length")]
    talk(["Hi"], monkeypatch)
    assert main(["chat", "tiny", "--max-tokens", "12", *COLD]) == 0
    assert capsys.readouterr().out.strip() == found[0][0]
