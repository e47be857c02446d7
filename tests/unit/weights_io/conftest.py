"""Tiny checkpoints of three kinds; names, shapes and formulas by hand, nothing here knows of the key maps.

E embed, F mlp, H heads, K kv heads, D head, V vocab, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from safetensors.numpy import save_file

from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import gemma, gpt2, llama
from forerun.models.gpt2 import Gpt2, Gpt2Config
from forerun.models.layer_kinds import LayerKind
from forerun.nn import spec
from forerun.nn.rope import Rope
from forerun.nn.sharding import WEIGHTS_STORED, partition

E, F, H, K, D, V, P = 16, 24, 4, 2, 8, 40, 12
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """A model, its table, the shapes of its tensors, and its parameters from the tensors by plain numpy."""

    model: Any
    table: tuple[Any, ...]
    shapes: dict[str, tuple[int, ...]]
    params: Callable[[Arrays], Arrays]

    def tensors(self, dtype: str) -> Arrays:
        random = np.random.default_rng(7)
        return {
            name: random.normal(size=shape).astype(np.float32).astype(DTYPES[dtype])
            for name, shape in self.shapes.items()
        }

    def wanted(self, mesh: Mesh, dtype: Any) -> Any:
        """Every weight split as far as it goes, however small it is."""

        def placed(s: spec.ParamSpec) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, partition(s.shape, s.axes, mesh.shape, WEIGHTS_STORED))
            return jax.ShapeDtypeStruct(s.shape, dtype, sharding=sharding)

        return spec.map_specs(placed, self.model.specs())


def with_tail() -> Kind:
    """Gemma's names: five layers of two kinds, so four in `blocks` and one in `tail`."""
    kinds = (LayerKind(4, Rope(1e4, D)), LayerKind(None, Rope(1e6, D)))
    config = DecoderConfig(
        5, E, H, K, D, F, V, tied=True, qk_norm=True, norms="both", norm_around_one=True, activation="gelu", kinds=kinds
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    for n in range(5):
        layer = f"model.layers.{n}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (H * D, E),
            layer + "self_attn.k_proj.weight": (K * D, E),
            layer + "self_attn.v_proj.weight": (K * D, E),
            layer + "self_attn.o_proj.weight": (E, H * D),
            layer + "self_attn.q_norm.weight": (D,),
            layer + "self_attn.k_norm.weight": (D,),
            layer + "mlp.gate_proj.weight": (F, E),
            layer + "mlp.up_proj.weight": (F, E),
            layer + "mlp.down_proj.weight": (E, F),
            layer + "input_layernorm.weight": (E,),
            layer + "post_attention_layernorm.weight": (E,),
            layer + "pre_feedforward_layernorm.weight": (E,),
            layer + "post_feedforward_layernorm.weight": (E,),
        }

    def params(t: Arrays) -> Arrays:
        found = {"embed": t["model.embed_tokens.weight"], "norm": t["model.norm.weight"]}
        for part, numbers in (("blocks", range(4)), ("tail", range(4, 5))):

            def layers(name: str, turn: Callable[[Any], Any], numbers: range = numbers) -> np.ndarray:
                return np.stack([turn(t[f"model.layers.{n}.{name}.weight"]) for n in numbers])

            found |= {
                f"{part}.query.value": layers("self_attn.q_proj", lambda w: w.reshape(H, D, E).transpose(2, 0, 1)),
                f"{part}.key.value": layers("self_attn.k_proj", lambda w: w.reshape(K, D, E).transpose(2, 0, 1)),
                f"{part}.value.value": layers("self_attn.v_proj", lambda w: w.reshape(K, D, E).transpose(2, 0, 1)),
                f"{part}.out.value": layers("self_attn.o_proj", lambda w: w.T.reshape(H, D, E)),
                f"{part}.query_norm": layers("self_attn.q_norm", lambda w: w),
                f"{part}.key_norm": layers("self_attn.k_norm", lambda w: w),
                f"{part}.gate.value": layers("mlp.gate_proj", lambda w: w.T),
                f"{part}.up.value": layers("mlp.up_proj", lambda w: w.T),
                f"{part}.down.value": layers("mlp.down_proj", lambda w: w.T),
                f"{part}.attention_norm": layers("input_layernorm", lambda w: w),
                f"{part}.attention_post_norm": layers("post_attention_layernorm", lambda w: w),
                f"{part}.mlp_norm": layers("pre_feedforward_layernorm", lambda w: w),
                f"{part}.mlp_post_norm": layers("post_feedforward_layernorm", lambda w: w),
            }
        return found

    return Kind(Decoder(config), gemma.TABLE, shapes, params)


def fused() -> Kind:
    """Phi-3's names: q, k, v in one matrix, gate and up in another; an untied head."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, E),
        "model.norm.weight": (E,),
        "lm_head.weight": (V, E),
    }
    for n in range(3):
        layer = f"model.layers.{n}."
        shapes |= {
            layer + "self_attn.qkv_proj.weight": ((H + K + K) * D, E),
            layer + "self_attn.o_proj.weight": (E, H * D),
            layer + "mlp.gate_up_proj.weight": (2 * F, E),
            layer + "mlp.down_proj.weight": (E, F),
            layer + "input_layernorm.weight": (E,),
            layer + "post_attention_layernorm.weight": (E,),
        }

    def params(t: Arrays) -> Arrays:
        def layers(name: str, turn: Callable[[Any], Any]) -> np.ndarray:
            return np.stack([turn(t[f"model.layers.{n}.{name}.weight"]) for n in range(3)])

        q, k = H * D, K * D
        qkv, both = "self_attn.qkv_proj", "mlp.gate_up_proj"
        return {
            "embed": t["model.embed_tokens.weight"],
            "norm": t["model.norm.weight"],
            "head.value": t["lm_head.weight"],
            "blocks.query.value": layers(qkv, lambda w: w[:q].T.reshape(E, H, D)),
            "blocks.key.value": layers(qkv, lambda w: w[q : q + k].T.reshape(E, K, D)),
            "blocks.value.value": layers(qkv, lambda w: w[q + k :].T.reshape(E, K, D)),
            "blocks.out.value": layers("self_attn.o_proj", lambda w: w.T.reshape(H, D, E)),
            "blocks.gate.value": layers(both, lambda w: w[:F].T),
            "blocks.up.value": layers(both, lambda w: w[F:].T),
            "blocks.down.value": layers("mlp.down_proj", lambda w: w.T),
            "blocks.attention_norm": layers("input_layernorm", lambda w: w),
            "blocks.mlp_norm": layers("post_attention_layernorm", lambda w: w),
        }

    return Kind(Decoder(DecoderConfig(3, E, H, K, D, F, V, tied=False)), llama.PHI3_TABLE, shapes, params)


def gpt2_kind() -> Kind:
    """GPT-2's names: matrices the other way round, q, k, v side by side, biases."""
    depth = E // H
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (V, E),
        "transformer.wpe.weight": (P, E),
        "transformer.ln_f.weight": (E,),
        "transformer.ln_f.bias": (E,),
    }
    per_layer = {
        "ln_1.weight": (E,),
        "ln_1.bias": (E,),
        "attn.c_attn.weight": (E, 3 * E),
        "attn.c_attn.bias": (3 * E,),
        "attn.c_proj.weight": (E, E),
        "attn.c_proj.bias": (E,),
        "ln_2.weight": (E,),
        "ln_2.bias": (E,),
        "mlp.c_fc.weight": (E, F),
        "mlp.c_fc.bias": (F,),
        "mlp.c_proj.weight": (F, E),
        "mlp.c_proj.bias": (E,),
    }
    shapes |= {f"transformer.h.{n}.{name}": shape for n in range(2) for name, shape in per_layer.items()}

    def params(t: Arrays) -> Arrays:
        def layers(name: str, turn: Callable[[Any], Any] = lambda w: w) -> np.ndarray:
            return np.stack([turn(t[f"transformer.h.{n}.{name}"]) for n in range(2)])

        found = {
            "embed": t["transformer.wte.weight"],
            "positions": t["transformer.wpe.weight"],
            "norm": t["transformer.ln_f.weight"],
            "norm_bias": t["transformer.ln_f.bias"],
            "blocks.attention_norm": layers("ln_1.weight"),
            "blocks.attention_norm_bias": layers("ln_1.bias"),
            "blocks.out.value": layers("attn.c_proj.weight", lambda w: w.reshape(H, depth, E)),
            "blocks.out_bias": layers("attn.c_proj.bias"),
            "blocks.mlp_norm": layers("ln_2.weight"),
            "blocks.mlp_norm_bias": layers("ln_2.bias"),
            "blocks.up.value": layers("mlp.c_fc.weight"),
            "blocks.up_bias": layers("mlp.c_fc.bias"),
            "blocks.down.value": layers("mlp.c_proj.weight"),
            "blocks.down_bias": layers("mlp.c_proj.bias"),
        }
        for n, name in enumerate(("query", "key", "value")):
            part = slice(n * E, (n + 1) * E)
            found[f"blocks.{name}.value"] = layers("attn.c_attn.weight", lambda w, p=part: w[:, p].reshape(E, H, depth))
            found[f"blocks.{name}_bias"] = layers("attn.c_attn.bias", lambda w, p=part: w[p].reshape(H, depth))
        return found

    return Kind(Gpt2(Gpt2Config(2, E, H, F, V, P)), gpt2.TABLE, shapes, params)


KINDS = {"with_tail": with_tail, "fused": fused, "gpt2": gpt2_kind}
MESHES = {"1": (1, 1, 1), "1x8x1": (1, 8, 1), "2x2x2": (2, 2, 2)}


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]()


@pytest.fixture
def gpt2_checkpoint() -> Kind:
    return gpt2_kind()


@pytest.fixture
def tied_checkpoint() -> Kind:
    return with_tail()


@pytest.fixture(params=sorted(MESHES))
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return mesh_of(MESHES[request.param])


@pytest.fixture
def one_device() -> Mesh:
    return mesh_of((1, 1, 1))


@pytest.fixture
def cube() -> Mesh:
    return mesh_of((2, 2, 2))


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Arrays], Path]:
    """Tensors as a checkpoint of one file, written by the safetensors library."""

    def saved(tensors: Arrays) -> Path:
        folder = tmp_path / "original"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return saved


def mesh_of(shape: tuple[int, int, int]) -> Mesh:
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), ("data", "fsdp", "tp"))
