"""Capabilities that models declare, and the defaults for models that declare none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from forerun.errors import UserError
from forerun.generate.engine import Engine, UncachedModel
from forerun.hardware.mesh import MeshShape
from forerun.models.base import Capabilities, capabilities_of
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig, Gpt2Config
from forerun.models.gpt2 import Gpt2
from forerun.models.layer_kinds import LayerKind
from forerun.nn.compute import Compute
from forerun.nn.rope import LongRope, Rope
from forerun.nn.spec import initial
from forerun.objectives.distil import _fit
from forerun.program import kernels
from forerun.program.build import make_mesh

CONFIG = DecoderConfig(3, 32, 4, 2, 8, 48, 64, window=40)
LONG = LayerKind(None, Rope(1e4, 8, LongRope((1.0,) * 4, (2.0,) * 4, 4096, 1.0)))
LONGER = LayerKind(7, Rope(1e4, 8, LongRope((1.0,) * 4, (2.0,) * 4, 8192, 1.0)))


@dataclass(frozen=True)
class Custom:
    """A custom model in the sense of `model: module:Class`, computed by a model of forerun."""

    inner: Any = Decoder(CONFIG)

    @property
    def vocab(self) -> int:
        return int(self.inner.vocab)

    @property
    def heads(self) -> int | None:
        return None

    def specs(self) -> Any:
        return self.inner.specs()

    def apply(self, *arguments: Any) -> Any:
        return self.inner.apply(*arguments)

    def flops_per_token(self, sequence: int) -> float:
        return float(self.inner.flops_per_token(sequence))


class WithConfig(Custom):
    config = SimpleNamespace(layers=5, positions=77, attention_softcap=30.0, layer_kinds=(LONG,))


class WithPartOfConfig(Custom):
    config = SimpleNamespace(layers=5)


class WithCache(Custom):
    def cache(self, rows: int, length: int, dtype: Any) -> Any:
        return self.inner.cache(rows, length, dtype)

    def extend(self, *arguments: Any) -> Any:
        return self.inner.extend(*arguments)


class WithHalfACache(Custom):
    cache = WithCache.cache


class Declaring(WithConfig, WithCache):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(positions=9, attention_softcap=20.0)


class DeclaringAMethod(Custom):
    def capabilities(self) -> Capabilities:
        return Capabilities()


def test_forerun_s_own_models_declare_theirs() -> None:
    decoder = Decoder(replace(CONFIG, attention_softcap=50.0))
    kind = LayerKind(40, Rope(10_000.0, 8, None))
    assert decoder.capabilities == Capabilities(3, None, 50.0, (kind,), has_cache=True, splits_sequences=True)
    assert Gpt2(Gpt2Config(2, 32, 4, 64, 64, 100)).capabilities == Capabilities(2, 100, None, (), has_cache=True)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Custom(), Capabilities()),
        (WithConfig(), Capabilities(5, 77, 30.0, (LONG,))),
        (WithPartOfConfig(), Capabilities(layers=5)),
        (WithCache(), Capabilities(has_cache=True)),
        (WithHalfACache(), Capabilities()),
        (Declaring(), Capabilities(positions=9, attention_softcap=20.0)),
        (UncachedModel(WithConfig()), Capabilities(5, 77, 30.0, (LONG,), has_cache=True)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_that_declares_none_has_defaults(model: Any, expected: Capabilities) -> None:
    assert capabilities_of(model) == expected


def test_a_method_instead_of_a_property_is_an_error() -> None:
    with pytest.raises(UserError) as error:
        capabilities_of(DeclaringAMethod())
    assert error.value.code == "E-MODEL-019"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [((), None), (CONFIG.layer_kinds, None), ((LayerKind(None, None),), None), ((LONGER, LONG), 4096)],
)
def test_the_rope_switch_is_the_shortest_original_context(kinds: Any, expected: int | None) -> None:
    assert Capabilities(layer_kinds=kinds).rope_switch == expected


@pytest.mark.parametrize(("model", "kernel"), [(Custom(), "cudnn"), (WithConfig(), "xla"), (Declaring(), "xla")])
def test_a_soft_cap_excludes_cudnn(model: Any, kernel: str) -> None:
    assert kernels.attention("auto", "gpu", "NVIDIA H200", "bfloat16", model).kernel.name == kernel
    assert _fit(Compute(attention=kernels.Kernel("cudnn")), model).attention.name == kernel


@pytest.mark.parametrize(
    ("model", "positions", "switch", "recomputes"),
    [
        (Custom(), None, None, True),
        (WithCache(), None, None, False),
        (WithConfig(), 77, 4096, True),
        (Declaring(), 9, None, True),
    ],
)
def test_the_engine_reads_them(model: Any, positions: int | None, switch: int | None, recomputes: bool) -> None:
    params = initial(model.specs(), jax.random.key(0))
    engine = Engine(model, params, make_mesh(MeshShape(1, 1, 1), jax.devices()[:1]), Compute(), frozenset(), 64)
    assert (engine.positions, engine.switch, isinstance(engine.model, UncachedModel)) == (positions, switch, recomputes)
