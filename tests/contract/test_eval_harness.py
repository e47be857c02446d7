"""lm-eval's own model of transformers and ours, on the same tiny checkpoint: the same answer to every request."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from error_assertions import raises_error
from families_reference import Variant, reference_of

pytestmark = [
    pytest.mark.torch,
    # of lm-eval and what it stands on; none of them is ours to mend
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:(lm_eval|torch|transformers|datasets|huggingface_hub|rouge_score)"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
if importlib.util.find_spec("lm_eval") is None and not os.environ.get("CI"):
    pytestmark.append(pytest.mark.skip(reason="needs lm-eval: scripts/dev --torch sets it up"))

CONTEXT = 48
TEXT = [
    "The river ran past the mill and under the stone bridge.",
    "A boat came down the river in the morning, and nobody was in it.",
    "In the evening the miller closed the gate, and the wheel stood still.",
    "Wie schön: the cat sat on the mill's wheel — and fell.",
]
CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
PAIRS = [
    ("The river", " ran past"),
    ("The river ", "ran past"),
    ("The river  \n ", "ran"),
    ("", "The mill"),
    ("", "<s>The mill"),
    ("<s>The boat", " came"),
    ("Wie sch", "ön: the cat"),
    (" ".join(TEXT), " and the wheel stood still."),
    ("x", " ".join(TEXT)[:60]),
    ("The river", " ran past"),
]


@pytest.fixture(scope="module", autouse=True)
def no_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    def refuse(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"a test reaches for the network: {address}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        patch.setattr(socket.socket, "connect", refuse)
        import lm_eval.evaluator

        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # half a minute of questions to torch
        yield


@functools.cache
def checkpoint(folder: Path, opens: bool) -> Any:
    """Written by transformers and tokenizers into `folder`; `opens`: the tokenizer puts <s> before every text."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXT * 4, trainer)
    if opens:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = CHAT
    model = reference_of(
        Variant("", "Llama", {"vocab_size": inner.get_vocab_size(), "max_position_embeddings": CONTEXT})
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(params=[False, True], ids=["plain", "opened"], scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """(ours, lm-eval's, the checkpoint's folder)."""
    from lm_eval.models.huggingface import HFLM

    from forerun.evaluate.harness import HarnessModel
    from forerun.evaluate.scoring import Scorer
    from forerun.trained_model.load_model import load_model
    from forerun.verbs.evaluate import language_of, longest_context, writer_of

    folder = tmp_path_factory.mktemp("checkpoint")
    reference, tokenizer = checkpoint(folder, request.param)
    loaded = load_model(str(folder), device="cpu", dtype="float32")
    context = longest_context(str(folder))
    scorer = Scorer(loaded.model, loaded.params, loaded.mesh, loaded.compute, rows=8, context=context)
    ours = HarnessModel(scorer, language_of(loaded), writer_of(loaded))
    theirs = HFLM(pretrained=reference, tokenizer=tokenizer, batch_size=4)
    assert ours.max_length == theirs.max_length == CONTEXT
    return ours, theirs, folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    choices = [
        {"question": text.split(",")[0], "choices": [" in the mill", " on the wheel", " river"], "label": n % 3}
        for n, text in enumerate(TEXT * 3)
    ]
    lines = {
        "choice": choices,
        "rolling": [{"text": text} for text in (*TEXT, " ".join(TEXT))],
        "answer": [{"question": f"{text}\n" * (1 + n % 3), "answer": "river"} for n, text in enumerate(TEXT)],
    }
    common = "test_split: test\nmetadata:\n  version: 1.0\n"
    kinds = {
        "choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: label\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n",
        "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n",
        "answer": "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        "generation_kwargs:\n  until: ['e', ' the']\n  max_gen_toks: 12\n  do_sample: false\n"
        "metric_list:\n  - metric: exact_match\n",
    }
    for name, rows in lines.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        (folder / f"{name}.yaml").write_text(f"task: tiny_{name}\n{source}{common}{kinds[name]}")
    return folder


def test_every_pair_gets_the_same_tokens_and_score(models: tuple[Any, Any, Path]) -> None:
    from lm_eval.api.instance import Instance

    ours, theirs, _ = models
    for text in (*TEXT, "", " x", "<s>x"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    requests = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=n) for n, pair in enumerate(PAIRS)]
    found, wanted = ours.loglikelihood(requests), theirs.loglikelihood(requests)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]


def test_every_request_of_every_kind_of_task_gets_the_same_answer(models: tuple[Any, Any, Path], tasks: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    ours, theirs, _ = models
    names = ["tiny_choice", "tiny_rolling", "tiny_answer"]
    found, wanted = (
        lm_eval.simple_evaluate(
            model=model,
            tasks=names,
            task_manager=TaskManager(include_defaults=False, include_path=str(tasks)),
            bootstrap_iters=0,
        )
        for model in (ours, theirs)
    )
    for name, count in zip(names, (12, 5, 4), strict=True):
        assert len(found["samples"][name]) == count
        for mine, right in zip(found["samples"][name], wanted["samples"][name], strict=True):
            assert mine["arguments"] == right["arguments"]
            if name == "tiny_answer":
                assert mine["resps"] == right["resps"]
            else:
                assert _numbers(mine["resps"]) == pytest.approx(_numbers(right["resps"]), abs=1e-3)
    assert any(sample["resps"][0][0] for sample in found["samples"]["tiny_answer"]), "all answers are empty"
    for name in names:
        for metric, value in wanted["results"][name].items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, rel=1e-4), (name, metric)


def test_conversations_become_the_same_text(models: tuple[Any, Any, Path]) -> None:
    ours, theirs, _ = models
    asked = [{"role": "user", "content": "The river?"}]
    begun = [*asked, {"role": "assistant", "content": "It ran"}]
    assert ours.apply_chat_template(asked) == theirs.apply_chat_template(asked)
    texts = [model.apply_chat_template(begun, add_generation_prompt=False) for model in (ours, theirs)]
    assert texts[0] == texts[1]
    assert texts[0].endswith("It ran"), "the answer is to go on, so nothing stands behind it"
    assert ours.chat_template(True) == theirs.chat_template(True) == CHAT


def test_what_a_task_cannot_have_is_said(models: tuple[Any, Any, Path]) -> None:
    from lm_eval.api.instance import Instance

    def asked(**wish: Any) -> list[Instance]:
        return [Instance(request_type="generate_until", doc={}, arguments=("The", wish), idx=0)]

    ours, _, _ = models
    with raises_error("E-EVAL-002", "num_beams=4"):
        ours.generate_until(asked(until=["."], num_beams=4))
    with raises_error("E-EVAL-003", str(CONTEXT)):
        ours.generate_until(asked(until=["."], max_gen_toks=CONTEXT))
    assert (
        len(ours.generate_until(asked(until=["."], max_gen_toks=4, num_beams=1, do_sample=True, temperature=0.7))) == 1
    )


def test_unknown_and_unreadable_tasks_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import manager

    from forerun.errors import UserError
    from forerun.evaluate.tasks import run_tasks

    # lm-eval reads all files of its folder of tasks, thousands, for each unknown name. Here it has one of them.
    theirs = Path(manager.__file__).parent
    shutil.copytree(theirs / "hellaswag", tmp_path / "defaults" / "hellaswag")
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "defaults" / "manager.py"))
    model: Any = (None, None, None)  # not touched before the tasks are known
    lost = tmp_path / "lost.yaml"
    kind = "output_type: loglikelihood_rolling\ndoc_to_target: '{{text}}'\ntest_split: test\n"
    lost.write_text(f"task: lost\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: no.jsonl}}}}\n{kind}")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("hellaswga", "did you mean 'hellaswag'"),
        (str(lost), "cannot be loaded"),
        (str(tmp_path / "no.yaml"), "does not exist"),
        (str(tmp_path / "empty"), "contains no task"),
    ):
        with pytest.raises(UserError) as caught:
            run_tasks([name], *model)
        assert words in str(caught.value)


def test_the_command_prints_the_table_and_its_numbers(
    models: tuple[Any, Any, Path], tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forerun.cli.main import main

    _, _, folder = models
    text = tmp_path / "held_out.txt"
    text.write_text("\n".join(TEXT))
    where = [str(folder), "--device", "cpu", "--dtype", "float32", "--batch", "4"]
    assert main(["eval", *where, "--tasks", f"{tasks}/choice.yaml", "--limit", "6"]) == 0
    shown = capsys.readouterr()
    assert "tiny_choice" in shown.out
    assert "acc_norm" in shown.out
    assert "18/18 requests" in shown.err
    assert main(["eval", *where, "--tasks", str(tasks), "--data", str(text), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["tasks"]["results"]) == {"tiny_choice", "tiny_rolling", "tiny_answer"}
    assert answer["data"]["loss"] == pytest.approx(_reference_loss(folder, text.read_text()), abs=1e-4)
    assert answer["data"]["text_bytes"] == len(text.read_bytes()) - len("The"), "the first token is given"


def _reference_loss(folder: Path, text: str) -> float:
    """By transformers: rows of CONTEXT tokens, each beginning anew, the end token predicted too."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])
    total = 0.0
    for start in range(0, len(ids) - 1, CONTEXT):
        row = ids[start : start + CONTEXT + 1]
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    return total / (len(ids) - 1)


def _numbers(answers: Any) -> list[float]:
    """All numbers of nested lists, a bool being one too."""
    if isinstance(answers, (list, tuple)):
        return [number for answer in answers for number in _numbers(answer)]
    return [float(answers) if not isinstance(answers, str) else float(answers == "True")]
