"""The number of FLOPs of a decoder."""

from __future__ import annotations

import jax

from forerun.models.decoder_config import DecoderConfig
from forerun.models.decoder_params import decoder_specs
from forerun.models.parameter_axes import active_matrix_count, matrix_count
from forerun.nn.spec import count


def decoder_flops(c: DecoderConfig, sequence: int) -> float:
    """Return the FLOPs per token of a forward and backward pass.

    Counts 6 per matrix element (2 forward, 4 backward). Causal attention adds 12 x heads x head_dim x S/2 per
    layer, or less with a window. The gated delta rule adds 18 per element of its state: it reads the state twice
    and writes it once. The embedding counts only if it is also the output matrix. Of the experts, those count that
    a token uses.
    """
    looked_up = c.vocab * (c.embed + c.size("Y"))
    matrices = count([leaf for leaf in jax.tree.leaves(decoder_specs(c)) if leaf.decay]) - looked_up
    matrices -= matrix_count(c) - active_matrix_count(c)
    if c.tied:
        matrices += c.vocab * c.embed
    scores = sum(
        c.size("H", kind.shape)
        * c.size("D", kind.shape)
        * (sequence / 2 if kind.window is None else _mean_window(sequence, kind.window))
        for kind in c.all_kinds
        if kind.mixer == "attention"
    )
    shapes = [kind.shape for kind in c.all_kinds if kind.mixer == "delta"]
    states = sum(c.size("H", shape) * c.size("D", shape) * c.size("W", shape) for shape in shapes)
    return 6.0 * matrices + 12.0 * scores + 18.0 * states


def _mean_window(sequence: int, window: int) -> float:
    """Return the mean number of visible positions under a sliding window."""
    window = min(window, sequence)
    return window * (1 - window / (2 * sequence))
