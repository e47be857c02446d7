"""New tokens of a checkpoint: data, rows, training next to LoRA, resume, and both kinds of export."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import assert_error
from safetensors.numpy import load_file, save_file

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.nn.weights.dense import Extended
from forerun.program.build import program_of
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model, tokenizer_of
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.train import train
from forerun.run_folder.run_folder import RunFolder
from forerun.track.display.make_display import make_display
from forerun.trained_model.base_weights import read_file_weights
from forerun.trained_model.load_model import fsdp_mesh, load_model, saved_params
from forerun.verbs.export.export import export

sys.path.append(str(Path(__file__).parents[1] / "data" / "tokens"))

NEW, SPECIAL = ["<tool>", "</tool>"], ["<|call|>"]
TEXT = "the quick <tool>fox jumps</tool> over the lazy dog. " * 4
WIDTH, INNER = 32, 48
COMMON = (
    "sequence: 32\nbatch: 8\nsteps: 4\ndevice: cpu\ndevices: 1\nsample: {tokens: 0}\nremat: none\n"
    "precision: {compute: float32}\noptimizer: {lr: 1.0e-2, warmup: 0, schedule: constant}\ncheckpoint: {every: 2}\n"
)


def ids_of_the_base() -> int:
    from small_tokenizers import byte_level

    return 1 + max(byte_level().get_vocab(with_added_tokens=True).values())


def write_base(folder: Path, vocab: int, *, tied: bool) -> None:
    from small_tokenizers import byte_level, saved

    folder.mkdir()
    saved(byte_level(), folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied, "eos_token_id": 0,
        "hidden_act": "silu", "rope_theta": 10000.0, "bos_token_id": None, "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, WIDTH), "model.norm": (WIDTH,)}
    shapes |= {} if tied else {"lm_head": (vocab, WIDTH)}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER)}
    layer |= {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    random = np.random.default_rng(0)
    drawn = {name: random.normal(0, 0.1, shape) if len(shape) > 1 else np.ones(shape) for name, shape in shapes.items()}
    save_file({f"{name}.weight": x.astype(np.float32) for name, x in drawn.items()}, folder / "model.safetensors")


def trained(job: Job) -> RunFolder:
    with make_display(io.StringIO()) as display:
        train(job, display)
    return RunFolder(Path(job.runs) / job.name)


class Place:
    """A base and a run from it. `tied` has no spare rows, so its matrix grows; `untied` has spare rows."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.first = ids_of_the_base()
        self.rows = self.first if kind == "tied" else 384
        self.vocab = max(self.rows, self.first + 3)
        write_base(folder / "base", self.rows, tied=kind == "tied")
        (folder / "text.txt").write_text(TEXT * 8)
        (folder / "job.yaml").write_text(
            f"name: once\nmodel: {{name: ./base, new_tokens: {NEW}, new_special_tokens: {SPECIAL}}}\ndata: text.txt\n"
            f"lora: {{rank: 2, base: float32}}\nruns: {folder / 'runs'}\n{COMMON}"
        )
        self.run = trained(self.job())

    def job(self, *overrides: str) -> Job:
        return load(self.folder / "job.yaml", list(overrides)).job

    @property
    def tables(self) -> list[str]:
        return ["model.embed_tokens.weight", *([] if self.kind == "tied" else ["lm_head.weight"])]


@pytest.fixture(scope="module", params=["tied", "untied"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("new_tokens"), request.param)


def recorded(place: Place) -> ResolvedJob:
    return ResolvedJob(load(place.run.job).job)


def test_the_run_records_the_ids_and_the_data_uses_them(place: Place) -> None:
    section = recorded(place).job.model
    assert (section.first_new_token, section.vocab) == (place.first, place.vocab)
    tokenizer = tokenizer_of(resolve_model(place.job()))
    assert tokenizer.encode("x<tool></tool><|call|>").tolist()[1:] == [place.first, place.first + 1, place.first + 2]
    assert tokenizer.decode([place.first]) == "<tool>"
    assert list(tokenizer.specials)[-1:] == SPECIAL
    stored = open_corpus(resolve_model(place.job())).parts[0].store.train
    ids = stored.read(0, stored.tokens)[0].tolist()
    assert ids.count(place.first) == ids.count(place.first + 1) == 32
    assert place.first + 2 not in ids


def test_old_rows_stay_bit_for_bit_and_new_rows_learn(place: Place, tmp_path: Path) -> None:
    before = load_file(place.folder / "base" / "model.safetensors")
    folder = export(str(place.run.path), str(tmp_path / "merged"), merge=True).folder
    after = load_file(folder / "model.safetensors")
    new = slice(place.first, place.first + 3)
    assert set(after) == set(before)
    for name in place.tables:
        assert after[name].shape == (place.vocab, WIDTH)
        old = np.ones(place.vocab, bool)
        old[new] = False
        np.testing.assert_array_equal(after[name][old], before[name][old[: place.rows]])
        mean = before[name].mean(0, dtype=np.float64)
        moved = np.abs(after[name][new] - mean).max(1)
        assert (moved[:2] > 1e-3).all(), moved  # the special token is not in the data
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == place.vocab
    assert set(NEW + SPECIAL) <= {
        one["content"] for one in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }


def test_a_checkpoint_has_only_the_new_rows(place: Place) -> None:
    resolved = recorded(place)
    params = saved_params(place.run, 4, resolved, fsdp_mesh(resolved.job))
    assert isinstance(params.embed, Extended)
    assert params.embed.base is None
    assert params.embed.rows.shape == (3, WIDTH)
    assert (params.head is None) == (place.kind == "tied")


@pytest.mark.parametrize("place", ["tied"], indirect=True)
def test_a_resumed_run_is_the_same(place: Place) -> None:
    trained(place.job("name=twice", "steps=2"))
    again = trained(place.job("name=twice"))
    resolved = recorded(place)
    mesh = fsdp_mesh(resolved.job)
    one, other = (saved_params(run, 4, resolved, mesh) for run in (place.run, again))
    assert len(jax.tree.leaves(one)) > 10
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("place", ["tied"], indirect=True)
def test_several_devices_compute_the_same_step(place: Place) -> None:
    """The program is the one that `plan` compiles for a slice."""
    job = place.job("devices=4")
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    losses = []
    for shape in (MeshShape(1, 1, 1), MeshShape(1, 2, 2)):
        program = program_of(resolved, shape, jax.devices()[: shape.devices], corpus.rows.epoch)
        state = program.initial_state(0, read_file_weights(resolved, program))
        batch = jax.tree.map(lambda like: np.ones(like.shape, like.dtype), program.batch)
        tokens = np.arange(batch.tokens.size, dtype=np.int32).reshape(batch.tokens.shape) % place.vocab
        batch = replace(batch, tokens=tokens, targets=tokens)
        batch = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), batch, program.batch)
        with jax.set_mesh(program.mesh):
            after, metrics = jax.jit(program.step)(state, batch, program.placed_schedule())
        losses.append((float(metrics.loss), float(metrics.grad_norm)))
        assert not np.array_equal(after.params.embed.rows, state.params.embed.rows)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_full_fine_tuning_resizes_with_the_mean(place: Place) -> None:
    resolved = resolve_model(place.job("lora=null"))
    program = program_of(resolved, MeshShape(1, 1, 1), jax.devices()[:1])
    params = program.initial_state(0, read_file_weights(resolved, program)).params
    before = load_file(place.folder / "base" / "model.safetensors")
    old = np.ones(place.vocab, bool)
    old[place.first : place.first + 3] = False
    for name, table in zip(place.tables, [params.embed, getattr(params.head, "value", None)], strict=False):
        assert table.shape == (place.vocab, WIDTH)
        np.testing.assert_array_equal(np.asarray(table)[old], before[name][old[: place.rows]])
        mean = before[name].mean(0, dtype=np.float64)
        np.testing.assert_allclose(np.asarray(table)[~old], np.broadcast_to(mean, (3, WIDTH)), atol=1e-6)


def test_generation_uses_the_new_tokens(place: Place) -> None:
    from forerun.verbs.language_model import LanguageModel

    source = str(place.run.path)
    model = LanguageModel(lambda: load_model(source, device="cpu", devices=1), source, None)
    assert model.tokenizer.vocab == place.first + 3
    loaded = load_model(source, device="cpu", devices=1)
    assert loaded.params.embed.shape == (place.vocab, WIDTH)
    assert model.generate("the quick <tool>", max_tokens=4, temperature=0)


@pytest.mark.torch
def test_transformers_and_peft_compute_the_same(place: Place, tmp_path: Path) -> None:
    import peft
    import torch
    import transformers

    merged = export(str(place.run.path), str(tmp_path / "merged"), merge=True).folder
    adapter = export(str(place.run.path), str(tmp_path / "adapter")).folder
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(adapter)
    text = "the quick <tool>fox</tool><|call|> dog"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert place.first in ids[0].tolist()
    assert ids[0].tolist() == tokenizer_of(resolve_model(place.job())).encode(text).tolist()

    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(place.folder / "base", dtype=torch.float32)
    old = base.get_input_embeddings().weight.detach().numpy().copy()
    if place.kind == "tied":
        base.resize_token_embeddings(place.vocab)  # draws the new rows around the mean of the old ones
        drawn = base.get_input_embeddings().weight.detach().numpy()[place.first :]
        np.testing.assert_allclose(drawn, np.broadcast_to(old.mean(0), drawn.shape), atol=1e-3)
    adapted: Any = peft.PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        expected, got = whole(ids).logits.numpy(), adapted(ids).logits.numpy()
    assert expected.shape[-1] == place.vocab
    np.testing.assert_allclose(got, expected, atol=3e-5)
    loaded = load_model(str(place.run.path), device="cpu", devices=1)
    from forerun.verbs.export.write_model import _logits

    ours = _logits(loaded.model, loaded.params, ids[0].numpy(), loaded.mesh)
    np.testing.assert_allclose(ours, expected[0], atol=3e-5)


def test_mistakes_are_named(place: Place, tmp_path: Path) -> None:
    def error(*overrides: str) -> UserError:
        with pytest.raises(UserError) as refused:
            resolve_model(place.job(*overrides))
        return refused.value

    assert_error(error("model.new_tokens=['<think>']"), "E-DATA-148", what="<think>")
    assert_error(error("data.tokenizer=bytes"), "E-DATA-147")
    scratch = "model={layers: 1, embed: 16, heads: 2, new_tokens: ['<tool>']}"
    assert_error(error(scratch, "lora=null"), "E-METHOD-020")
    assert "E-JOB-075" in str(error("model.new_tokens=['<tool>', '<tool>']"))
    assert "E-JOB-076" in str(error("preferences=dpo"))
    assert_error(error("model.vocab=400"), "E-MODEL-011")


def test_a_tokenizer_with_more_ids_than_rows_is_refused(place: Place, tmp_path: Path) -> None:
    from small_tokenizers import byte_level, saved
    from tokenizers import Tokenizer

    larger = Tokenizer.from_str(byte_level().to_str())
    larger.add_tokens([f"<extra {n}>" for n in range(100)])
    saved(larger, tmp_path)
    with pytest.raises(UserError) as refused:
        resolve_model(place.job(f"data.tokenizer={tmp_path}"))
    assert_error(refused.value, "E-METHOD-021", what=str(place.rows))
