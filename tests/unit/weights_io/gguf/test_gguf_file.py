"""GGUF files of small models: names, rotation, metadata and values, read by the package gguf."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_assertions import assert_error
from safetensors.numpy import save_file

from forerun.errors import UserError
from forerun.models.decoder_config import DecoderConfig
from forerun.models.families.registry import FAMILIES
from forerun.models.layer_kinds import LayerKind
from forerun.models.quantization_config import Rounding
from forerun.nn.rope import Linear, Rope, Yarn
from forerun.weights_io.gguf import gguf_file
from forerun.weights_io.gguf.architecture import (
    ARCHITECTURES,
    GgufTensor,
    architecture_of,
    gguf_name,
    interleaved,
    metadata_of,
)
from forerun.weights_io.gguf.block_types import FILE_TYPES, tensor_types
from forerun.weights_io.gguf.gguf_file import write_gguf
from forerun.weights_io.packed import config_section, pack

sys.path.append(str(Path(__file__).parents[2] / "data" / "tokens"))
gguf = pytest.importorskip("gguf")
WIDTH, HEADS, KV_HEADS, VOCAB = 256, 4, 2, 384
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
PLAIN = DecoderConfig(2, 32, 4, 2, 8, 48, 100, tied=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer with rows of 256 weights."""
    from small_tokenizers import byte_level, saved

    place = tmp_path_factory.mktemp("llama")
    saved(byte_level(), place)
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (place / "chat_template.jinja").write_text(TEMPLATE)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH,
        "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 10000.0, "dtype": "float32",
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config))
    narrow = WIDTH // HEADS * KV_HEADS
    shapes = {"model.embed_tokens": (VOCAB, WIDTH), "model.norm": (WIDTH,)}
    layer = {"q": (WIDTH, WIDTH), "k": (narrow, WIDTH), "v": (narrow, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {f"model.layers.0.self_attn.{name}_proj": shape for name, shape in layer.items()}
    shapes |= {f"model.layers.0.mlp.{name}_proj": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
    shapes |= {f"model.layers.0.{name}_layernorm": (WIDTH,) for name in ("input", "post_attention")}
    random = np.random.default_rng(0)
    drawn = {f"{name}.weight": random.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(drawn, place / "model.safetensors")
    return place


def values(path: Path) -> dict[str, np.ndarray]:
    return {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(path).tensors}


def field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def expected(folder: Path) -> dict[str, np.ndarray]:
    """The tensors by llama.cpp's names; rows of q and k by a plain loop over heads and pairs."""
    from safetensors.numpy import load_file

    named = load_file(folder / "model.safetensors")
    pairs = WIDTH // HEADS // 2

    def turned(matrix: np.ndarray) -> np.ndarray:
        rows = []
        for head in range(len(matrix) // (2 * pairs)):
            for pair in range(pairs):
                rows += [matrix[head * 2 * pairs + pair], matrix[head * 2 * pairs + pairs + pair]]
        return np.stack(rows)

    layer = "model.layers.0."
    return {
        "token_embd.weight": named["model.embed_tokens.weight"],
        "output_norm.weight": named["model.norm.weight"],
        "blk.0.attn_q.weight": turned(named[layer + "self_attn.q_proj.weight"]),
        "blk.0.attn_k.weight": turned(named[layer + "self_attn.k_proj.weight"]),
        "blk.0.attn_v.weight": named[layer + "self_attn.v_proj.weight"],
        "blk.0.attn_output.weight": named[layer + "self_attn.o_proj.weight"],
        "blk.0.ffn_gate.weight": named[layer + "mlp.gate_proj.weight"],
        "blk.0.ffn_up.weight": named[layer + "mlp.up_proj.weight"],
        "blk.0.ffn_down.weight": named[layer + "mlp.down_proj.weight"],
        "blk.0.attn_norm.weight": named[layer + "input_layernorm.weight"],
        "blk.0.ffn_norm.weight": named[layer + "post_attention_layernorm.weight"],
    }


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m"])
def test_values_are_those_of_the_folder(folder: Path, tmp_path: Path, kind: str) -> None:
    made = write_gguf(folder, tmp_path / "model.gguf", kind, name="small", ends=[2, 0])
    found, wanted = values(made.path), expected(folder)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        difference = np.abs(found[name] - value)
        if kind == "f32" or value.ndim == 1:
            assert not difference.any(), name
        elif kind == "f16":
            np.testing.assert_array_equal(found[name], value.astype(np.float16).astype(np.float32))
        elif kind == "bf16":
            assert (difference <= np.abs(value) * 2.0**-8).all(), name
        elif kind == "q8_0":
            # Half a step of the largest of 32 weights / 127, and the step is rounded to float16.
            step = np.abs(value.reshape(-1, 32)).max(1) / 127
            limit = step * (0.5 + 127 * 2.0**-11) * 1.001
            assert (difference.reshape(-1, 32) <= limit[:, None]).all(), name
        else:
            assert np.sqrt((difference**2).mean() / (value**2).mean()) < 0.1, name
    assert bool(made.error) == (kind != "f32")
    assert made.notes == ()


def integer_folder(folder: Path, place: Path, bits: int, group: int) -> dict[str, np.ndarray]:
    """Write the model with integers in its linear layers, and return the values of these layers by name."""
    import ml_dtypes
    from safetensors.numpy import load_file

    shutil.copytree(folder, place)
    random, stored, wanted = np.random.default_rng(1), load_file(folder / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        stem, (rows, columns) = name.removesuffix(".weight"), stored.pop(name).shape
        top = 2 ** (bits - 1)
        codes = random.integers(-top + 1, top, (rows, columns)).astype(np.int8)
        scale = random.uniform(0.001, 0.02, (rows, columns // group)).astype(ml_dtypes.bfloat16)
        stored[f"{stem}.weight_scale"] = scale
        if bits == 4:
            stored[f"{stem}.weight_packed"] = pack(codes, 4)
            stored[f"{stem}.weight_shape"] = np.array([rows, columns], np.int64)
        else:
            stored[name] = codes
        wanted[name] = codes * np.repeat(scale.astype(np.float32), group, axis=1)
    save_file(stored, place / "model.safetensors")
    config = json.loads((place / "config.json").read_text())
    section = config_section(Rounding(bits, group, False), ["lm_head"])
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return wanted


@pytest.mark.parametrize(("bits", "group", "kind"), [(4, 32, "q4_0"), (4, 64, "q8_0"), (8, 32, "q8_0")])
def test_trained_integers_are_kept_exactly(folder: Path, tmp_path: Path, bits: int, group: int, kind: str) -> None:
    wanted = integer_folder(folder, tmp_path / "model", bits, group)
    made = write_gguf(tmp_path / "model", tmp_path / "model.gguf", kind, name="small", ends=[0])
    found = values(made.path)
    names = {"attn_v": "self_attn.v_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    for ours, theirs in names.items():
        np.testing.assert_array_equal(found[f"blk.0.{ours}.weight"], wanted[f"model.layers.0.{theirs}.weight"])
    q = wanted["model.layers.0.self_attn.q_proj.weight"]
    assert sorted(map(tuple, q)) == sorted(map(tuple, found["blk.0.attn_q.weight"])), "the same rows in another order"
    assert len(made.notes) == 1


def test_trained_integers_that_are_rounded_again_are_reported(folder: Path, tmp_path: Path) -> None:
    integer_folder(folder, tmp_path / "model", 4, 16)
    made = write_gguf(tmp_path / "model", tmp_path / "model.gguf", "q4_0", name="small", ends=[0])
    assert "7 of 7" in made.notes[0]


def test_metadata_and_vocabulary(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "model.gguf", "q4_k_m", name="small", ends=[2, 0])
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    wanted = {
        "general.architecture": "llama",
        "general.name": "small",
        "general.file_type": 15,
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": WIDTH,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": 64,
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    assert {key: field(reader, key) for key in wanted} == wanted
    assert field(reader, "llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert len(field(reader, "tokenizer.ggml.tokens")) == VOCAB
    kinds = {one.name: one.tensor_type.name for one in reader.tensors}
    assert kinds["token_embd.weight"] == "Q6_K", "it is the output matrix, too"
    assert kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert kinds["blk.0.ffn_down.weight"] == "Q6_K", "the last layer"


def test_a_wrong_file_is_not_proven(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = gguf_file.encoded
    monkeypatch.setattr(gguf_file, "encoded", lambda value, kind: encoded(value * np.float32(1.01), kind))
    for kind in ("f16", "q4_k_m"):
        with pytest.raises(UserError) as raised:
            write_gguf(folder, tmp_path / f"{kind}.gguf", kind, name="small", ends=[0])
        assert_error(raised.value, "E-WEIGHTS-023")


@pytest.mark.parametrize(
    ("kind", "coded"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("q4_k_m", "Q4_K"), ("q4_k_m", "Q6_K")]
)
def test_a_quantization_error_above_its_limit_is_not_proven(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, coded: str
) -> None:
    """Only the tensors of one type are wrong, by more than the limit of this type."""
    encoded, limit = gguf_file.encoded, gguf_file.ERROR_LIMITS[coded]
    factors = {coded: np.float32(1 + 1.5 * limit)}
    monkeypatch.setattr(
        gguf_file, "encoded", lambda value, kind: encoded(value * factors.get(kind, np.float32(1)), kind)
    )
    with pytest.raises(UserError) as raised:
        write_gguf(folder, tmp_path / "model.gguf", kind, name="small", ends=[0])
    assert_error(raised.value, "E-WEIGHTS-023")


def test_values_beyond_float16(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = gguf_file.TensorSource.value
    monkeypatch.setattr(gguf_file.TensorSource, "value", lambda self, tensor: value(self, tensor) * np.float32(1e8))
    with pytest.raises(UserError) as raised:
        write_gguf(folder, tmp_path / "model.gguf", "f16", name="small", ends=[0])
    assert_error(raised.value, "E-WEIGHTS-010")


def test_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError) as raised:
        gguf_file.require_gguf()
    assert_error(raised.value, "E-WEIGHTS-020")


def test_names_are_those_of_the_package() -> None:
    """The package has a table of the names of all architectures."""
    compared = 0
    for model_type, architecture in ARCHITECTURES.items():
        family = FAMILIES[model_type]
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        table = gguf.get_tensor_name_map(kinds[architecture.name], 2)
        for tensor in family.table:
            name = tensor.name.replace("{}", "1")
            wanted = table.get_name(name, try_suffixes=(".weight", ".bias"))
            if wanted is not None:
                assert gguf_name(name, architecture) == wanted
                compared += 1
    assert compared > 100


def test_both_rotations_give_the_same_products() -> None:
    """Hugging Face rotates halves of a head, llama.cpp neighbours: q . k must not change."""
    random = np.random.default_rng(0)
    heads, dims, width = 2, 8, 5
    q, k = (random.normal(size=(heads * dims, width)).astype(np.float32) for _ in range(2))
    x, y = random.normal(size=(2, width))
    angles = {position: position / 10.0 ** (np.arange(dims // 2) / 4) for position in (3, 11)}

    def halves(vector: np.ndarray, position: int) -> np.ndarray:
        one, two = vector.reshape(heads, 2, -1).swapaxes(0, 1)
        cos, sin = np.cos(angles[position]), np.sin(angles[position])
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=1)

    def neighbours(vector: np.ndarray, position: int) -> np.ndarray:
        found = np.empty((heads, dims))
        for head, values in enumerate(vector.reshape(heads, dims)):
            for pair, angle in enumerate(angles[position]):
                a, b = values[2 * pair : 2 * pair + 2]
                found[head, 2 * pair] = a * np.cos(angle) - b * np.sin(angle)
                found[head, 2 * pair + 1] = b * np.cos(angle) + a * np.sin(angle)
        return found

    wanted = (halves(q @ x, 3) * halves(k @ y, 11)).sum(1)
    found = (neighbours(interleaved(q, heads) @ x, 3) * neighbours(interleaved(k, heads) @ y, 11)).sum(1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def keys(model_type: str, config: Any, **content: Any) -> Any:
    return metadata_of(FAMILIES[model_type], config, content)


def gemma3(layers: int = 7, near_scaling: Any = None, **changes: Any) -> DecoderConfig:
    near, far = LayerKind(512, Rope(1e4, 8, near_scaling)), LayerKind(None, Rope(1e6, 8, Linear(8.0)))
    given = {"layers": layers, "qk_norm": True, "kinds": (*[near] * 5, far), "query_scale": 8**-0.5}
    return replace(PLAIN, norms="both", activation="gelu", **{**given, **changes})


def test_keys_of_gemma3() -> None:
    found = keys("gemma3_text", gemma3(), max_position_embeddings=8192)
    wanted = {
        "gemma3.context_length": 8192,
        "gemma3.attention.sliding_window": 512,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.freq_base_swa": 1e4,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    assert {key: found.keys.get(key) for key in wanted} == wanted
    assert found.notes == ()


def test_a_window_that_llama_cpp_ignores_limits_the_context() -> None:
    found = keys("mistral", replace(PLAIN, window=64), max_position_embeddings=1000)
    assert found.keys["llama.context_length"] == 64
    assert len(found.notes) == 1


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gemma3_text", gemma3(query_scale=0.1)),
        ("gemma3_text", gemma3(near_scaling=Linear(2.0))),
        ("gemma3_text", gemma3(kinds=gemma3().kinds[3:])),
        ("gemma2", replace(gemma3(), attention_softcap=None)),
        ("qwen3", replace(PLAIN, qk_norm=True, out_bias=True)),
        ("olmo2", replace(PLAIN, head_dim=16)),
        ("qwen2", replace(PLAIN, rope_scaling=Yarn(4.0, 64, attention=3.0))),
        ("smollm3", replace(PLAIN, layers=4)),
    ],
)
def test_settings_that_llama_cpp_ignores_are_rejected(model_type: str, config: Any) -> None:
    with pytest.raises(UserError) as raised:
        architecture_of(FAMILIES[model_type], config)
    assert_error(raised.value, "E-WEIGHTS-021")


@pytest.mark.parametrize("model_type", sorted({"other", *FAMILIES} - {*ARCHITECTURES}))
def test_a_family_without_an_architecture_is_rejected_by_name(model_type: str) -> None:
    other = replace(FAMILIES["llama"], model_type=model_type)
    with pytest.raises(UserError) as raised:
        architecture_of(other, PLAIN)
    assert_error(raised.value, "E-WEIGHTS-021", what=model_type)


def test_rows_that_do_not_divide_into_blocks() -> None:
    """As llama-quantize: Q5_0 for Q4_K, Q8_0 for Q6_K, and float16 if not even 32 divides a row."""
    tensors = [
        GgufTensor("token_embd.weight", (10, 288), None),
        GgufTensor("blk.0.attn_q.weight", (8, 288), None),
        GgufTensor("blk.0.attn_k.weight", (8, 48), None),
        GgufTensor("blk.0.attn_norm.weight", (48,), None),
    ]
    assert list(tensor_types(tensors, "q4_k_m", 1, tied=True).values()) == ["Q8_0", "Q5_0", "F16", "F32"]
    assert list(tensor_types(tensors, "q8_0", 1, tied=True).values()) == ["Q8_0", "Q8_0", "F16", "F32"]
    assert list(tensor_types(tensors, "f16", 1, tied=True).values()) == ["F16", "F16", "F16", "F32"]
    assert set(FILE_TYPES) >= {"f16", "q8_0", "q4_k_m"}


def test_texts_of_a_checkpoint_add_no_metadata(folder: Path, tmp_path: Path) -> None:
    """Names and templates are anyone's: they end neither their own value nor the list of keys."""
    hostile = "{# \x00\ngeneral.architecture\x00\x08\x00 \"}} #}{{ '\u202e' }}"
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text(hostile)
    plain = gguf.GGUFReader(write_gguf(folder, tmp_path / "plain.gguf", "f32", name="small", ends=[2, 0]).path)
    other = gguf.GGUFReader(write_gguf(copy, tmp_path / "other.gguf", "f32", name=hostile, ends=[2, 0]).path)
    assert list(other.fields) == list(plain.fields)
    assert field(other, "tokenizer.chat_template") == hostile
    changed = {key for key in plain.fields if key.startswith("GGUF.") or field(plain, key) != field(other, key)}
    assert {key for key in changed if not key.startswith("GGUF.")} == {"general.name", "tokenizer.chat_template"}
    assert [tensor.name for tensor in other.tensors] == [tensor.name for tensor in plain.tensors]
