"""Causal attention by cuDNN's flash kernel, with each packed document as a separate sequence.

XLA compiles the custom calls `__cudnn$fmhaSoftmax` and `__cudnn$fmhaSoftmaxBackward` to cuDNN graphs. jax has a wrapper
for them, but this module emits them itself (see docs/adr/0027-gpu-attention.md):

- jax's wrapper asks the installed cuDNN and the local GPU for their versions. `plan` has neither.
- In jax 0.10 its packed layout has wrong key offsets if there are fewer key/value heads than query heads.
- Its softmax statistics have one row for each sequence. Here the residual has one value for each token and head.

Letters: B rows, S positions of a row, T = B x S tokens, N sequences of a kernel call, H query heads, K key/value heads,
D head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# cuDNN allocates its float32 query gradients as [N, H, S, D], although the sequences together have only B x S tokens.
# N is therefore limited: to 8 sequences for each row, and to 131,072 positions (2 GiB for 32 heads of 128) unless that
# is less than 2 for each row. Documents that exceed N are processed by further kernel calls.
MOST_PER_ROW, LEAST_PER_ROW, POSITIONS = 8, 2, 1 << 17
OFFSET_LIMIT = 1 << 31  # XLA declares the offsets of sequences, in elements, as int32


@dataclass(frozen=True)
class FlashSettings:
    """What the kernel computes."""

    scale: float
    window: int | None
    residual: str  # the name of the residuals, for remat policies


def cudnn_supports(q_BSHD: jax.Array, softcap: float | None, largest_head: int) -> bool:
    """Return whether the kernel supports the queries of a layer. Other layers of the same model may differ."""
    head = q_BSHD.shape[-1]
    return softcap is None and q_BSHD.dtype in (jnp.bfloat16, jnp.float16) and head % 8 == 0 and head <= largest_head


def sequences_per_row(rows: int, length: int) -> int:
    """Return how many sequences one kernel call processes, as an average over the rows."""
    return max(LEAST_PER_ROW, min(MOST_PER_ROW, POSITIONS // (rows * length)))


def cudnn_attention(
    q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array, settings: FlashSettings
) -> jax.Array:
    """Return causal softmax attention within each run of equal segments, [B, S, H, D].

    Any number of documents is possible. The first kernel call processes `sequences_per_row` documents for each row, on
    average. A loop processes the others.
    """
    rows = q_BSHD.shape[0]
    if q_BSHD.size < OFFSET_LIMIT or rows == 1:
        return _attention(settings, q_BSHD, k_BSKD, v_BSKD, segments_BS)
    q, k, v, segments = (jnp.split(x, [rows // 2]) for x in (q_BSHD, k_BSKD, v_BSKD, segments_BS))
    halves = zip(q, k, v, segments, strict=True)
    return jnp.concatenate([cudnn_attention(*half, settings) for half in halves])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenSequences:
    """The sequence of each token. A sequence is a run of equal segments within a row, in the order of tokens."""

    begins_T: jax.Array  # whether a sequence begins at the token
    number_T: jax.Array  # of the token's sequence

    @classmethod
    def of(cls, segments_BS: jax.Array) -> TokenSequences:
        """Return the sequences of rows with packed documents. Padding is a sequence, too."""
        same_as_before = segments_BS[:, 1:] == segments_BS[:, :-1]
        begins_T = jnp.pad(~same_as_before, ((0, 0), (1, 0)), constant_values=True).reshape(-1)
        return cls(begins_T, jnp.cumsum(begins_T, dtype=jnp.int32) - 1)

    def starts(self, group: jax.Array | int, size: int) -> jax.Array:
        """Return the first token of each sequence of a group, and the end of the last one, [size + 1].

        A group has `size` sequences. Missing sequences of the last group start at the end of the tokens, so their
        length is 0.
        """
        tokens = self.begins_T.size
        place_T = self.number_T - group * size
        place_T = jnp.where(self.begins_T & (place_T >= 0) & (place_T <= size), place_T, size + 1)
        return jnp.full(size + 1, tokens, jnp.int32).at[place_T].set(jnp.arange(tokens, dtype=jnp.int32), mode="drop")

    def in_group(self, group: jax.Array | int, size: int) -> jax.Array:
        """Return whether each token is in a sequence of a group, [T]."""
        return self.number_T // size == group

    def groups(self, size: int) -> jax.Array:
        """Return the number of groups."""
        return self.number_T[-1] // size + 1


def by_group(run: Callable[[jax.Array | int], Any], sequences: TokenSequences, size: int) -> Any:
    """Return the arrays [B, S, ...] of `run(group)`, each token from the run of its group.

    Usually all sequences are in group 0. The loop over the other groups then costs one comparison.
    """

    def merge(new: jax.Array, old: jax.Array, mine_T: jax.Array) -> jax.Array:
        return jnp.where(mine_T.reshape(new.shape[:2] + (1,) * (new.ndim - 2)), new, old)

    def body(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        left, found = state
        group = groups - left
        mine_T = sequences.in_group(group, size)
        return left - 1, jax.tree.map(partial(merge, mine_T=mine_T), run(group), found)

    groups = sequences.groups(size)
    # Counting down to 0 lets `plan` see that the usual number of iterations is 0 (planner/time/trip_counts.py).
    return jax.lax.while_loop(lambda state: state[0] > 0, body, (groups - 1, run(0)))[1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: FlashSettings, q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array
) -> jax.Array:
    call = _Calls(q_BSHD, k_BSKD, settings)
    sequences = TokenSequences.of(segments_BS)

    def run(group: jax.Array | int) -> jax.Array:
        return call.forward(q_BSHD, k_BSKD, v_BSKD, sequences.starts(group, call.sequences), statistics=False)[0]

    out: jax.Array = by_group(run, sequences, call.sequences)
    return checkpoint_name(out, settings.residual)


def _attention_forward(
    settings: FlashSettings, q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the output, and the residuals: the inputs, the output and the softmax statistics of each token."""
    call = _Calls(q_BSHD, k_BSKD, settings)
    sequences = TokenSequences.of(segments_BS)

    def run(group: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        starts = sequences.starts(group, call.sequences)
        out_BSHD, statistics_NHS = call.forward(q_BSHD, k_BSKD, v_BSKD, starts, statistics=True)
        return out_BSHD, token_statistics(statistics_NHS, starts, sequences, group).reshape(q_BSHD.shape[:3])

    out, statistics_BSH = by_group(run, sequences, call.sequences)
    # If a remat policy keeps both, the backward pass does not run the forward kernel again.
    out, statistics_BSH = (checkpoint_name(x, settings.residual) for x in (out, statistics_BSH))
    return out, (q_BSHD, k_BSKD, v_BSKD, segments_BS, out, statistics_BSH)


def _attention_backward(
    settings: FlashSettings, residuals: tuple[jax.Array, ...], dout_BSHD: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q_BSHD, k_BSKD, v_BSKD, segments_BS, out_BSHD, statistics_BSH = residuals
    call = _Calls(q_BSHD, k_BSKD, settings)
    sequences = TokenSequences.of(segments_BS)

    def run(group: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        starts = sequences.starts(group, call.sequences)
        statistics_NHS = sequence_statistics(statistics_BSH, starts)
        return call.backward(q_BSHD, k_BSKD, v_BSKD, statistics_NHS, dout_BSHD, out_BSHD, starts)

    dq, dk, dv = by_group(run, sequences, call.sequences)
    return dq, dk, dv, None


_attention.defvjp(_attention_forward, _attention_backward)


def token_statistics(
    statistics_NHS: jax.Array, starts: jax.Array, sequences: TokenSequences, group: jax.Array | int
) -> jax.Array:
    """Return the statistics of each token and head, [T, H]. Those of tokens outside the group have no meaning."""
    size, _, length = statistics_NHS.shape
    n_T = jnp.clip(sequences.number_T - group * size, 0, size - 1)
    s_T = jnp.clip(jnp.arange(sequences.number_T.size, dtype=jnp.int32) - starts[n_T], 0, length - 1)
    return statistics_NHS[n_T, :, s_T]


def sequence_statistics(statistics_BSH: jax.Array, starts: jax.Array) -> jax.Array:
    """Return the statistics as the kernel reads them, [N, H, S]: those of a sequence come first in its row."""
    rows, length, heads = statistics_BSH.shape
    statistics_HT = jnp.pad(statistics_BSH.reshape(rows * length, heads).T, ((0, 0), (0, length)))
    return jax.vmap(lambda start: jax.lax.dynamic_slice(statistics_HT, (0, start), (heads, length)))(starts[:-1])


class _Calls:
    """The two custom calls for arrays of one shape."""

    def __init__(self, q_BSHD: jax.Array, k_BSKD: jax.Array, settings: FlashSettings) -> None:
        self.rows, self.length, self.heads, self.head = q_BSHD.shape
        self.kv_heads = k_BSKD.shape[2]
        self.dtype = q_BSHD.dtype
        self.settings = settings
        self.per_row = sequences_per_row(self.rows, self.length)
        self.sequences = self.rows * self.per_row

    def forward(
        self, q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, starts: jax.Array, *, statistics: bool
    ) -> list[jax.Array]:
        """Return the output and, if wanted, the softmax statistics [N, H, S]. Other tokens have no meaning."""
        results = [self._heads_first(self.heads)]
        if statistics:
            results.append(jax.ShapeDtypeStruct((self.sequences, self.heads, self.length), jnp.float32))
        out, *rest = self._call(
            "__cudnn$fmhaSoftmax", results, 0, _FORWARD_PRODUCTS, (q_BSHD, k_BSKD, v_BSKD), starts, transposed=1
        )
        return [out, *rest]

    def backward(
        self,
        q_BSHD: jax.Array,
        k_BSKD: jax.Array,
        v_BSKD: jax.Array,
        statistics_NHS: jax.Array,
        dout_BSHD: jax.Array,
        out_BSHD: jax.Array,
        starts: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the gradients of queries, keys and values. Those of other tokens have no meaning."""
        # What cuDNN's frontend asks for: the query gradients, and the sum of each row of softmax gradients, in float32.
        # With cuDNN installed, XLA replaces the number by cuDNN's own.
        workspace_bytes = 4 * self.sequences * self.heads * self.length * (self.head + 1)
        dq, dk, dv = self._call(
            "__cudnn$fmhaSoftmaxBackward",
            [self._heads_first(n) for n in (self.heads, self.kv_heads, self.kv_heads)],
            workspace_bytes,
            _BACKWARD_PRODUCTS,
            (q_BSHD, k_BSKD, v_BSKD, statistics_NHS, dout_BSHD, out_BSHD),
            starts,
            transposed=3,
        )
        return dq, dk, dv

    def _heads_first(self, heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, heads, self.length, self.head), self.dtype)

    def _call(
        self,
        target: str,
        results: list[jax.ShapeDtypeStruct],
        workspace_bytes: int,
        products: dict[str, Any],
        operands: tuple[jax.Array, ...],
        starts: jax.Array,
        transposed: int,
    ) -> list[jax.Array]:
        """Return the results of a custom call, the first `transposed` ones as [B, S, heads, D]."""
        lengths = jnp.diff(starts)
        q_offsets, kv_offsets = (starts * (heads * self.head) for heads in (self.heads, self.kv_heads))
        # XLA names the dimensions of results [B, H, S, D]; in memory they are [B, S, H, D], like the operands.
        layouts = [(0, 2, 1, 3)] * transposed + [tuple(range(x.ndim)) for x in results[transposed:]] + [(0,)]
        call = jax.ffi.ffi_call(
            target,
            [*results, jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8)],
            output_layouts=layouts,
            custom_call_api_version=2,
            legacy_backend_config=json.dumps(self._configuration(products)),
        )
        found = call(*operands, lengths, lengths, q_offsets, kv_offsets)[:-1]
        return [x.swapaxes(1, 2) if i < transposed else x for i, x in enumerate(found)]

    def _configuration(self, products: dict[str, Any]) -> dict[str, Any]:
        """Return XLA's `GpuBackendConfig` of the call. Its 64-bit integers are strings."""
        scores = [self.rows, self.heads, self.length, self.length]
        attention = {
            "algorithm": {
                "algo_id": "0",
                "math_type": "TENSOR_OP_MATH",
                "tuning_knobs": {"17": "1", "24": "0"},
                "is_cudnn_frontend": True,
                "workspace_size": "0",
            },
            "fmha_scale": self.settings.scale,
            # The shape of the scores, which the kernel never has in memory.
            "intermediate_tensor_shape": {
                "element_type": {"bfloat16": "BF16", "float16": "F16"}[self.dtype.name],
                "dimensions": [str(size) for size in scores],
                "tuple_shapes": [],
                "layout": {
                    "dim_level_types": [],
                    "dim_unique": [],
                    "dim_ordered": [],
                    "minor_to_major": ["3", "2", "1", "0"],
                    "tiles": [],
                    "element_size_in_bits": "0",
                    "memory_space": "0",
                    "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
                    "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
                    "dynamic_shape_metadata_prefix_bytes": "0",
                },
                "is_dynamic_dimension": [False] * 4,
            },
            "is_flash_attention": True,
            "mask_type": "PADDING_CAUSAL",
            **products,
            "dropout_rate": 0.0,
            "seed": 42,
            "sliding_window_length": self.settings.window or 0,
            "max_seg_per_batch": self.per_row,
            "is_paged_attention": False,
        }
        return {"operation_queue_id": "0", "cudnn_fmha_backend_config": attention}


def _product(left: int, right: int, left_batch: tuple[int, int], right_batch: tuple[int, int]) -> dict[str, list[str]]:
    return {
        "lhs_contracting_dimensions": [str(left)],
        "rhs_contracting_dimensions": [str(right)],
        "lhs_batch_dimensions": [str(x) for x in left_batch],
        "rhs_batch_dimensions": [str(x) for x in right_batch],
    }


# The matrix products of attention, with operands [B, S, H, D] and scores [B, H, S, S].
_FORWARD_PRODUCTS = {
    "bmm1_dot_dimension_numbers": _product(3, 3, (0, 2), (0, 2)),  # queries x keys -> scores
    "bmm2_dot_dimension_numbers": _product(3, 1, (0, 1), (0, 2)),  # scores x values -> output
}
_BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1_dot_dimension_numbers": _product(2, 1, (0, 1), (0, 2)),  # scores' gradients x queries
    "bmm1_grad_gemm2_dot_dimension_numbers": _product(3, 1, (0, 1), (0, 2)),  # scores' gradients x keys
    "bmm2_grad_gemm1_dot_dimension_numbers": _product(2, 1, (0, 1), (0, 2)),  # scores x output's gradients
    "bmm2_grad_gemm2_dot_dimension_numbers": _product(3, 3, (0, 2), (0, 2)),  # output's gradients x values
}
