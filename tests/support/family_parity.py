"""The comparison of a family with Hugging Face transformers: logits, gradients, packing, cache, greedy text, export.

The contract tests and `scripts/family-check` use these functions, so that both apply the same requirements. Both sides
compute in float32. torch and transformers are imported inside functions only.

Eight rows, padded to the right: four beyond LongRope's original context, three below it, and one of packed documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.config.schema import Remat
from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hardware.mesh import MeshShape
from forerun.hub.safetensors import open_weights
from forerun.models.families.base import Family
from forerun.models.keys import entries, leaves_of
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.sharding import stored
from forerun.objectives.batch import Batch
from forerun.objectives.next_token import NextToken
from forerun.program.build import make_mesh
from forerun.weights_io.match import dtypes_of
from forerun.weights_io.read import read_params
from forerun.weights_io.write import write_params

VOCAB = 96
ORIGINAL = 24  # the context before scaling; some documents are shorter, some longer
LENGTH = 40
LONG, SHORT = (40, 33, 29, 26), (23, 9, 17)
DOCUMENTS = (6, 25, 7)  # packed in the last row, two positions of padding behind them

LOGITS_LIMIT = 1e-4  # the largest absolute difference
GRADIENTS_LIMIT = 1e-3  # the norm of the difference divided by the norm of the gradient, of the worst parameter
SPREAD = 0.5  # logits with a smaller standard deviation would hide differences

TOKENS = 64  # of greedy text
PROMPTS = [[5, 17, 3, 90, 11, 42, 8], [33], list(range(10, 40))]  # the last is longer than LongRope's first context


@dataclass(frozen=True, eq=False)
class Pair:
    """One checkpoint in both worlds."""

    folder: Path
    reference: Any  # transformers' model
    family: Family
    model: Any
    params: Any  # numpy leaves

    def params_of(self, named: Mapping[str, np.ndarray]) -> Any:
        return params_of(named, self.family, self.model)


def params_of(named: Mapping[str, np.ndarray], family: Family, model: Any) -> Any:
    """Return tensors by their names in a checkpoint as the model's tree. It serves gradients as well."""
    specs = model.specs()
    leaves = {path: np.full(one.shape, np.nan, np.float32) for path, one in leaves_of(specs).items()}
    listed = entries(family.table, specs, model.stacks)
    assert {entry.name for entry in listed} == set(named)
    for entry in listed:
        tensor = named[entry.name]
        assert tensor.shape == entry.shape, entry.name
        for piece in entry.pieces:
            end = piece.start + piece.step * piece.shape[entry.along]
            part = tensor[(slice(None),) * entry.along + (slice(piece.start, end, piece.step),)]
            part = part.reshape(piece.split).transpose(piece.order)
            leaves[piece.path][piece.lead] = part
    for path, leaf in leaves.items():
        assert not np.isnan(leaf).any(), f"{path} was not filled"
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=spec.is_spec), leaves.values())


def rows() -> Batch[np.ndarray]:
    rng = np.random.default_rng(0)
    whole = [(n,) for n in (*LONG, *SHORT)]
    shape = (len(whole) + 1, LENGTH)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, lengths in enumerate([*whole, DOCUMENTS]):
        ends = np.cumsum(lengths)
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True), start=1):
            segments[row, end - length : end], positions[row, end - length : end] = number, np.arange(length)
    drawn = rng.integers(1, VOCAB, (shape[0], LENGTH + 1)).astype(np.int32)  # torch gives padding, 0, no gradient
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] > 0)  # the target is of the same document
    counted = np.pad(inside, ((0, 0), (0, 1))) & (rng.random(shape) < 0.7)
    return Batch(drawn[:, :-1], drawn[:, 1:], counted.astype(np.float32), segments, positions)


ROWS = rows()
REAL = ROWS.segments > 0


def separate_documents() -> Batch[np.ndarray]:
    """Return the documents of the packed row, each alone in a row, in the shape of `ROWS`."""
    arrays = [np.zeros_like(array) for array in (ROWS.tokens, ROWS.targets, ROWS.weights, ROWS.segments)]
    positions = np.zeros_like(ROWS.positions)
    for row, (end, length) in enumerate(zip(np.cumsum(DOCUMENTS), DOCUMENTS, strict=True)):
        arrays[0][row, :length] = ROWS.tokens[-1, end - length : end]
        arrays[3][row, :length], positions[row, :length] = 1, np.arange(length)
    tokens, targets, weights, segments = arrays
    return Batch(tokens, targets, weights, segments, positions)


SEPARATE = separate_documents()

# ---- Logits ----


def reference_logits(one: Pair, tokens_BS: np.ndarray, lengths: tuple[int, ...]) -> Any:
    """Return the logits of rows that are padded to the right. transformers needs an attention mask for that."""
    import torch

    mask = torch.from_numpy(np.arange(tokens_BS.shape[1]) < np.array(lengths)[:, None]).long()
    answer = one.reference(input_ids=torch.from_numpy(tokens_BS).long(), attention_mask=mask, use_cache=False)
    return answer.logits


def all_reference_logits(one: Pair) -> Any:
    """Return those of all rows, [B, S, V]: long and short ones in separate batches, packed documents one at a time."""
    import torch

    found = torch.zeros((*ROWS.tokens.shape, VOCAB))
    found[: len(LONG)] = reference_logits(one, ROWS.tokens[: len(LONG)], LONG)
    found[len(LONG) : -1, :ORIGINAL] = reference_logits(one, ROWS.tokens[len(LONG) : -1, :ORIGINAL], SHORT)
    for end, length in zip(np.cumsum(DOCUMENTS), DOCUMENTS, strict=True):
        here = slice(end - length, end)
        found[-1:, here] = reference_logits(one, ROWS.tokens[-1:, here], (length,))
    return found


@cache
def expected_logits(one: Pair) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits: np.ndarray = all_reference_logits(one).numpy()
    return logits


@cache
def _forward(one: Pair) -> Any:
    return jax.jit(lambda *arrays: one.model.apply(*arrays, Compute()).logits())


@cache
def our_logits(one: Pair, separate: bool = False) -> np.ndarray:
    """Return the logits of `ROWS`, or those of the packed documents in separate rows."""
    batch = SEPARATE if separate else ROWS
    return np.asarray(_forward(one)(one.params, batch.tokens, batch.segments, batch.positions))


def logits_difference(one: Pair) -> float:
    return float(np.abs(our_logits(one) - expected_logits(one))[REAL].max())


def packing_difference(one: Pair) -> float:
    """Return the largest difference between the logits of packed documents and of the same documents alone."""
    packed, alone = our_logits(one)[-1], our_logits(one, separate=True)
    parts = zip(np.cumsum(DOCUMENTS), DOCUMENTS, strict=True)
    return max(float(np.abs(packed[end - n : end] - alone[row, :n]).max()) for row, (end, n) in enumerate(parts))


# ---- Gradients of the mean loss ----


@cache
def expected_loss_and_gradients(one: Pair) -> tuple[float, Any]:
    """Return the loss of the reference and its gradients in the model's tree. Buffers have gradients of zero."""
    import torch

    targets, weights = torch.from_numpy(ROWS.targets).flatten().long(), torch.from_numpy(ROWS.weights).flatten()
    nats = torch.nn.functional.cross_entropy(all_reference_logits(one).flatten(0, 1), targets, reduction="none")
    loss = (nats * weights).sum() / weights.sum()
    loss.backward()
    return loss.item(), one.params_of(stored_gradients(one))


def stored_gradients(one: Pair) -> dict[str, np.ndarray]:
    """Return the gradients of the reference by the names of the tensors in the files. Those of buffers are zeros."""
    import torch

    with open_weights(one.folder) as weights:
        separate = any(".experts.0." in name for name in weights)
    if separate:  # one parameter has the matrices of all experts; transformers itself separates it for the files
        from transformers.core_model_loading import revert_weight_conversion

        joined = {name: leaf.grad for name, leaf in one.reference.named_parameters()}
        kept = one.reference.state_dict()
        joined |= {name: torch.zeros_like(leaf) for name, leaf in one.reference.named_buffers() if name in kept}
        return {name: leaf.numpy() for name, leaf in revert_weight_conversion(one.reference, joined).items()}
    trained = {id(leaf): leaf.grad.numpy() for leaf in one.reference.parameters()}
    return {key: trained.get(id(leaf), np.zeros(tuple(leaf.shape), np.float32)) for key, leaf in stored_tensors(one)}


def stored_tensors(one: Pair) -> list[tuple[str, Any]]:
    """Return the parameters and buffers of the reference that are in the files, by their names there.

    A tied head is not in the files. The names differ from those of the modules if the files have a prefix.
    """
    members = dict([*one.reference.named_parameters(), *one.reference.named_buffers()])
    with open_weights(one.folder) as weights:
        if set(weights) <= set(members):
            return [(name, members[name]) for name in weights]
        values = {leaf.detach().numpy().tobytes(): leaf for leaf in members.values()}
        return [(name, values[np.array(weights.view(name)).tobytes()]) for name in weights]


def loss_and_gradients(one: Pair) -> tuple[float, Any]:
    def loss(params: Any) -> jax.Array:
        batch = jax.tree.map(jnp.asarray, ROWS)
        sums = NextToken(chunk=7)(one.model, params, batch, Compute(remat=Remat(policy="none")))
        total, counted = sums.loss, sums.weight
        return total / counted

    value, gradients = jax.jit(jax.value_and_grad(loss))(one.params)
    return float(value), gradients


def norm_of(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


def gradient_errors(expected: Any, got: Any) -> dict[str, float]:
    """Return the norm of the difference divided by the norm of the gradient, by the path of each parameter."""
    nothing, found = 1e-6 * norm_of(expected), {}
    for (path, want), have in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        if norm_of(want) < nothing:  # GPT-2's bias of keys moves all scores of a query alike
            error = 0.0 if norm_of(have) < nothing else np.inf
        else:
            error = norm_of(have - want) / norm_of(want)
        found[jax.tree_util.keystr(path)] = error
    return found


# ---- Cache and greedy text ----


def cache_difference(one: Pair, expected: np.ndarray) -> float:
    """Return the largest difference of the logits with a cache from `expected`, which has those of all `ROWS`.

    Rows of unequal lengths are read in one go, then eight tokens one by one. None of them grows beyond LongRope's
    original context on the way: such a row must be read again.
    """
    steps, width, worst = 8, LENGTH - 8, 0.0
    extend = jax.jit(lambda *arrays: _logits_and_cache(one, *arrays))
    for first, lengths in ((0, LONG[:2]), (len(LONG), SHORT[:2])):
        here = slice(first, first + len(lengths))
        tokens, before = ROWS.tokens[here], np.array(lengths) - steps
        # What fills a row up lies where its next tokens will; it is nowhere, so it takes the last position.
        places = np.minimum(np.arange(width), before[:, None] - 1).astype(np.int32)
        kept = spec.map_specs(
            lambda leaf: np.full(leaf.shape, 1e3, leaf.dtype), one.model.cache(len(lengths), LENGTH, jnp.float32)
        )
        got, kept = extend(one.params, tokens[:, :width], places, kept)
        for row, length in enumerate(before):
            worst = max(worst, float(np.abs(got[row, :length] - expected[here][row, :length]).max()))
        for step in range(steps):
            at = (before + step)[:, None].astype(np.int32)
            got, kept = extend(one.params, np.take_along_axis(tokens, at, 1), at, kept)
            worst = max(worst, float(np.abs(got - np.take_along_axis(expected[here], at[:, :, None], 1)).max()))
    return worst


def _logits_and_cache(one: Pair, *arrays: Any) -> Any:
    readout, kept = one.model.extend(*arrays, Compute())
    return readout.logits(), kept


def reference_tokens(reference: Any, prompt: list[int]) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    settings = reference.generation_config
    settings.eos_token_id, settings.pad_token_id = None, 0
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def our_tokens(one: Pair, shape: MeshShape) -> list[list[int | None]]:
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    where = spec.map_specs(lambda s: stored(mesh, s.shape, s.axes), one.model.specs())
    params = jax.device_put(jax.tree.map(np.asarray, one.params), where)
    engine = Engine(one.model, params, mesh, Compute(), frozenset(), one.model.vocab)
    steps = list(Stream(engine, PROMPTS, Settings(TOKENS, Sampling(temperature=0))))
    return [[step[row] for step in steps] for row in range(len(PROMPTS))]


# ---- Export ----


def read_and_write(one: Pair, came: Path, went: Path, shape: MeshShape, shard_bytes: int) -> None:
    """Read the weights in `came` onto the devices as float32, and write them to `went` in their own dtypes."""
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    wanted = spec.map_specs(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32, sharding=stored(mesh, s.shape, s.axes)),
        one.model.specs(),
    )
    with open_weights(came) as weights:
        params = read_params(weights, one.family.table, one.model, wanted)
        dtypes = dtypes_of(weights, one.family.table, one.model)
    write_params(went, params, one.family.table, one.model, dtypes, shard_bytes=shard_bytes)


def changed_tensors(came: Path, went: Path) -> list[str]:
    """Return the names of the tensors whose dtype, shape or bytes differ, and of those in only one of the folders."""
    with open_weights(came) as before, open_weights(went) as after:
        both = set(before) & set(after)
        differing = [
            name
            for name in both
            if (before[name].dtype, before[name].shape) != (after[name].dtype, after[name].shape)
            or before.view(name).tobytes() != after.view(name).tobytes()
        ]
        return sorted((set(before) ^ set(after)) | set(differing))
