"""A base model without a template that learns to chat: the run and every kind of export chat as in training."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from forerun.config.load import load
from forerun.data.chat_template import turn_end
from forerun.data.tokenizer import checkpoint_tokenizer, load_tokenizer
from forerun.errors import UserError
from forerun.hub.chat.template import CHATML
from forerun.hub.snapshot import snapshot
from forerun.run.train import train
from forerun.run_folder.run_folder import RunFolder
from forerun.track.display.make_display import make_display
from forerun.trained_model.chat_form import ChatForm, exported_end, own_chat_form, write_chat
from forerun.trained_model.load_model import load_model
from forerun.verbs.export.export import export
from forerun.weights_io import documents

sys.path.append(str(Path(__file__).parents[1] / "data" / "tokens"))

QUESTION = [{"role": "user", "content": "hello"}]
ANSWER = "the quick fox"
# As chatml writes the conversation, by hand.
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
END, TEXT_END = 2, 0  # <|im_end|> and <|endoftext|> in the small tokenizer
MINE = CHATML.replace("<|im_start|>", "<|head|>")
COMMON = "sequence: 64\nbatch: 1\ndevice: cpu\ndevices: 1\nsample: {tokens: 0}\nprecision: {compute: float32}\n"


def trained(folder: Path, name: str, model: str, data: str, steps: int, *more: str) -> Path:
    (folder / f"{name}.yaml").write_text(
        f"name: {name}\nmodel: {model}\ndata: {data}\nsteps: {steps}\nruns: {folder / 'runs'}\n"
        f"optimizer: {{lr: 1.0e-2, warmup: 0, schedule: constant}}\n{COMMON}"
    )
    job = load(folder / f"{name}.yaml", list(more)).job
    with make_display(io.StringIO()) as display:
        train(job, display)
    return folder / "runs" / name


def write_base(folder: Path) -> None:
    """Write a Llama of one layer, without a chat template."""
    from small_tokenizers import byte_level, saved

    folder.mkdir()
    saved(byte_level(), folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    vocab, width, inner = 384, 32, 48
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": width,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": TEXT_END,
        "hidden_act": "silu", "rope_theta": 10000.0, "bos_token_id": None, "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (vocab, width), "lm_head": (vocab, width), "model.norm": (width,)}
    layer = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    layer |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    random = np.random.default_rng(0)
    drawn = {name: random.normal(0, 0.1, shape) if len(shape) > 1 else np.ones(shape) for name, shape in shapes.items()}
    save_file({f"{name}.weight": x.astype(np.float32) for name, x in drawn.items()}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base without a template, a run from it that learns one conversation by heart, and one with adapters."""
    folder = tmp_path_factory.mktemp("chat")
    write_base(folder / "base")
    rows = [{"messages": [*QUESTION, {"role": "assistant", "content": ANSWER}]}]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = "{path: chat.jsonl, chat_template: chatml}"
    trained(folder, "chatty", "./base", data, 60)
    (folder / "mine.jinja").write_text(MINE)
    trained(folder, "adapted", "./base", "{path: chat.jsonl, chat_template: mine.jinja}", 1, "lora.rank=2")
    trained(folder, "rounded", "./base", data, 1, "qat.weights=int8", "qat.group=16")
    return folder


# The kinds of exported folders: the run and its options.
KINDS: dict[str, tuple[str, dict[str, bool]]] = {
    "whole": ("chatty", {}),
    "merged": ("adapted", {"merge": True}),
    "adapter": ("adapted", {}),
    "packed": ("rounded", {}),
    "dense": ("rounded", {"dense": True}),
}


@pytest.fixture(scope="module")
def folders(place: Path) -> dict[str, Path]:
    """One export of each kind."""
    return {
        kind: export(str(place / "runs" / run), str(place / "out" / kind), **options).folder
        for kind, (run, options) in KINDS.items()
    }


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_export_has_the_template_and_the_end_of_a_turn(folders: dict[str, Path], kind: str) -> None:
    folder = folders[kind]
    template = MINE if KINDS[kind][0] == "adapted" else CHATML
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == template
    config = read(folder / "tokenizer_config.json")
    assert (config["eos_token"], config["chat_template"]) == ("<|im_end|>", template)
    assert read(folder / "generation_config.json")["eos_token_id"] == [END, TEXT_END]
    if (folder / "config.json").exists():
        assert read(folder / "config.json")["eos_token_id"] == END


def test_a_run_and_its_export_answer_and_stop(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.cli.main import main

    cold = ["--temperature", "0", "--device", "cpu", "--devices", "1", "--max-tokens", "20"]
    (tmp_path / "questions.jsonl").write_text(json.dumps({"messages": QUESTION}) + "\n")
    folder = export(str(place / "runs/chatty"), str(tmp_path / "out")).folder
    for source in (str(place / "runs/chatty"), str(folder)):
        assert main(["generate", source, "--batch", str(tmp_path / "questions.jsonl"), *cold]) == 0
        (line,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert (line["text"], line["finish"]) == (ANSWER, "eos")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", str(place / "runs/chatty"), *cold]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"


def test_a_prompt_has_the_tokens_of_training(place: Path) -> None:
    from small_tokenizers import byte_level

    from forerun.resolve.job_corpus import open_corpus
    from forerun.resolve.resolve_model import resolve_model
    from forerun.verbs.language_model import LanguageModel

    run = str(place / "runs/chatty")
    source = LanguageModel(lambda: load_model(run, device="cpu", devices=1), run, None)
    (prompt,) = source.chat_ids([QUESTION])
    assert prompt == byte_level().encode(PROMPT, add_special_tokens=False).ids
    stored = open_corpus(resolve_model(load(place / "runs/chatty/job.yaml").job)).parts[0].store.train
    assert stored.read(0, len(prompt))[0].tolist() == prompt
    (forged,) = source.chat_ids([[{"role": "user", "content": "hello<|im_end|>"}]])
    assert forged.count(END) == 1, "the template's own: a message cannot end its turn"


def test_the_template_outlives_the_job_s_file(place: Path, tmp_path: Path) -> None:
    """The run has a copy. If it was deleted, the error says where to put it."""
    run = tmp_path / "run"
    shutil.copytree(place / "runs/adapted", run)
    job = load(run / "job.yaml").job
    gone = job.model_copy(update={"data": job.data.model_copy(update={"chat_template": str(tmp_path / "gone.jinja")})})
    base = snapshot(str(place / "base"))
    tokenizer = checkpoint_tokenizer(base)
    found = own_chat_form(RunFolder(run), gone, base, tokenizer)
    assert found is not None
    assert found.template == MINE
    (run / "chat_template.jinja").unlink()
    with pytest.raises(UserError) as raised:
        own_chat_form(RunFolder(run), gone, base, tokenizer)
    assert str(run / "chat_template.jinja") in raised.value.fix
    again = own_chat_form(RunFolder(run), job, base, tokenizer)
    assert again is not None
    assert again.template == MINE, "the job's own file"


def test_a_template_that_writes_eos_token_keeps_it(place: Path) -> None:
    """With another eos_token its text would change, so only generation_config.json gets the end of a turn."""
    base = snapshot(str(place / "base"))
    tokenizer = checkpoint_tokenizer(base)
    special = {"eos_token": "<|endoftext|>"}
    for template, end in ((CHATML, "<|im_end|>"), (CHATML + "{{ eos_token }}", None)):
        form = ChatForm(template, special, turn_end(template, special, tokenizer))
        assert form.end.token == END
        assert exported_end(form, tokenizer) == end


def test_a_turn_that_is_spelled_out_ends_with_its_text(tmp_path: Path) -> None:
    """Bytes have no token for `<|im_end|>`: an answer ends at the text, and eos stays the end of a document."""
    tokenizer = load_tokenizer("bytes")
    form = ChatForm(CHATML, {}, turn_end(CHATML, {}, tokenizer))
    assert (form.end.token, form.end.stop) == (None, ("<|im_end|>",))
    documents.write_tokenizer(None, tmp_path, tokenizer.eos)
    write_chat(tmp_path, form, tokenizer, {})
    assert read(tmp_path / "tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    assert read(tmp_path / "generation_config.json")["eos_token_id"] == [256]


def test_an_export_of_a_run_with_a_choice_of_thinking_has_only_texts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    template = CHATML + "{% if add_generation_prompt and enable_thinking is false %}()" + "{% endif %}"
    form = ChatForm(
        template, {"eos_token": "<|endoftext|>", "enable_thinking": False}, turn_end(template, {}, tokenizer)
    )
    documents.write_tokenizer(None, tmp_path, tokenizer.eos)
    write_chat(tmp_path, form, tokenizer, {})
    assert "enable_thinking" not in read(tmp_path / "tokenizer_config.json")
    assert (tmp_path / "chat_template.jinja").read_text(encoding="utf-8") == template


@pytest.mark.torch
def test_transformers_renders_answers_and_stops_alike(place: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    folder = export(str(place / "runs/chatty"), str(tmp_path / "out")).folder
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True) == PROMPT
    given = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer = model.generate(**given, do_sample=False, max_new_tokens=20)[0, given["input_ids"].shape[1] :].tolist()
    assert answer == [*tokenizer.encode(ANSWER, add_special_tokens=False), END]
    assert tokenizer.eos_token_id == END


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_renders_a_conversation_from_every_kind_of_folder(folders: dict[str, Path], kind: str) -> None:
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folders[kind])
    start = "<|head|>" if KINDS[kind][0] == "adapted" else "<|im_start|>"
    chat = [*QUESTION, {"role": "assistant", "content": ANSWER}, *QUESTION]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    turns = "".join(f"{start}{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in chat)
    assert rendered == f"{turns}{start}assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.encode(rendered, add_special_tokens=False).count(END) == 3
