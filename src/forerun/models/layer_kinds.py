"""Kinds of layers, and the order in which a model has them. Does not import jax.

Layers of one model can differ in two ways. Layers with another window or another RoPE have the same parameters, so they
share one stack. Layers with other dimensions or another mixer have a `LayerShape`, and each shape has its own stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.nn.rope import Rope

Mixer = Literal["attention", "delta", "convolution"]
# Parts of the parameters that contain layers. A part is one stack, or a mapping from names of shapes to stacks.
SECTIONS = ("blocks", "tail", "last", "last_tail")
SHAPES = ("full", "sliding", "linear", "short")


@dataclass(frozen=True)
class LayerShape:
    """The dimensions of layers that are stacked together. None means the value of the model."""

    name: str  # one of SHAPES, so that a path in the parameters shows where the name of a shape is
    mixer: Mixer = "attention"
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None  # of keys, if values have another one
    value_dim: int | None = None  # of the heads of values; only "delta" has its own
    width: int | None = None  # tokens that a short convolution sees, including the current one
    mlp: int | None = None
    key_is_value: bool = False  # values are the keys before their norm, so there is no matrix for values
    shares_keys: bool = False  # attends to keys and values of an earlier layer, so it has no matrices for them

    def __post_init__(self) -> None:
        if self.name not in SHAPES:
            raise ValueError(f"{self.name!r} is not one of {SHAPES}")


@dataclass(frozen=True)
class LayerKind:
    """The properties in which layers of one model can differ."""

    window: int | None  # visible positions, including the query's own; None: all
    rope: Rope | None  # None: no position embedding
    shape: LayerShape | None = None  # None: the dimensions of the model, and attention

    @property
    def mixer(self) -> Mixer:
        """How a layer of this kind mixes positions."""
        return self.shape.mixer if self.shape else "attention"

    @property
    def shares_keys(self) -> bool:
        """Whether a layer of this kind attends to keys and values of an earlier layer."""
        return self.shape is not None and self.shape.shares_keys

    @property
    def stack_name(self) -> str | None:
        """The name of the shape, or None if all layers of the model are in one stack."""
        return self.shape.name if self.shape else None


@dataclass(frozen=True)
class Section:
    """Consecutive layers that are one part of the parameters.

    Attributes:
        name: The name of the part, one of SECTIONS.
        first: The number of its first layer in the model.
        layers: The number of its layers.
        kinds: One period of its layers.
        scanned: Whether a scan runs over its periods. Otherwise it has at most one period, without a scan.
    """

    name: str
    first: int
    layers: int
    kinds: tuple[LayerKind, ...]
    scanned: bool

    @property
    def stack_names(self) -> tuple[str, ...] | None:
        """The stack of each layer of a period, or None if all layers are in one stack."""
        if self.kinds[0].stack_name is None:
            return None
        return tuple(kind.stack_name or "" for kind in self.kinds)

    @property
    def shapes(self) -> dict[str | None, LayerShape | None]:
        """The shapes of the layers by name, in the order of their first layers."""
        return {kind.stack_name: kind.shape for kind in self.kinds}

    @property
    def shares_keys(self) -> bool:
        """Whether its layers attend to keys and values of earlier layers."""
        return any(kind.shares_keys for kind in self.kinds)

    def kind(self, number: int) -> LayerKind:
        """Return the kind of a layer, counted from the start of the section."""
        return self.kinds[number % len(self.kinds)]

    def numbers(self, stack_name: str | None) -> tuple[int, ...]:
        """Return the numbers in the model of the layers in one stack."""
        return tuple(self.first + n for n in range(self.layers) if self.kind(n).stack_name == stack_name)


def sections(
    first_layers: int, kinds: Sequence[LayerKind], last_layers: int, last: Sequence[LayerKind]
) -> list[Section]:
    """Return the sections of a model.

    Args:
        first_layers: The number of layers that repeat `kinds`.
        kinds: One period of the first layers.
        last_layers: The number of layers at the end that repeat `last` instead, or 0.
        last: One period of the last layers.
    """
    return [
        *_periods(("blocks", "tail"), 0, first_layers, tuple(kinds)),
        *_periods(("last", "last_tail"), first_layers, last_layers, tuple(last)),
    ]


def _periods(names: tuple[str, str], first: int, layers: int, kinds: tuple[LayerKind, ...]) -> list[Section]:
    """Return a section with all complete periods, and one with the layers that do not fill a period, if any."""
    if not layers:
        return []
    rest = layers % len(kinds)
    whole = layers - rest
    if not whole:
        return [Section(names[0], first, rest, kinds[:rest], scanned=False)]
    found = [Section(names[0], first, whole, kinds, scanned=True)]
    return [*found, Section(names[1], first + whole, rest, kinds[:rest], scanned=False)] if rest else found
