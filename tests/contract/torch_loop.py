"""The training loop in plain torch whose losses forerun's are compared with: one document at a time, torch's AdamW.

forerun packs, masks, shards and scans. This loop does none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from forerun.config.schema import Job
from forerun.hardware.devices import choose
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run.open_data import batches_of
from forerun.run.run_devices import program_on


def job_batches(job: Job, steps: int) -> list[Any]:
    """Return the first batches of a job on one device."""
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    batches = batches_of(resolved, program_on(resolved, choose("cpu", 1), corpus.rows.epoch), corpus)
    return [batches.batch_at(number) for number in range(steps)]


def documents(batch: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield tokens, targets and weights of each document of a batch, in the order of its rows."""
    import torch

    tokens, targets, weights, segments = (
        np.asarray(getattr(batch, name)).reshape(-1, batch.tokens.shape[-1])
        for name in ("tokens", "targets", "weights", "segments")
    )
    for row, numbers in enumerate(segments):
        for number in range(1, numbers.max() + 1):
            inside = numbers == number
            ids, next_ids = (torch.from_numpy(array[row][inside].astype(np.int64)) for array in (tokens, targets))
            yield ids, next_ids, torch.from_numpy(weights[row][inside])


def mean_loss(batch: Any, losses_of: Callable[[Any, Any], Any]) -> Any:
    """Return the mean of `losses_of(tokens, targets)`, a loss per token, over the weighted tokens of a batch."""
    import torch

    total, count = torch.zeros(()), 0.0
    for tokens, targets, weights in documents(batch):
        total = total + (losses_of(tokens, targets) * weights).sum()
        count += float(weights.sum())
    return total / count


def next_token_loss(model: Any) -> Callable[[Any], Any]:
    """Return the function from a batch to the mean loss of a model of transformers."""
    from torch.nn.functional import cross_entropy

    return lambda batch: mean_loss(
        batch, lambda ids, targets: cross_entropy(model(ids[None]).logits[0].float(), targets, reduction="none")
    )


def training_losses(
    weights: Iterable[tuple[str, Any]],
    optimizer: Any,
    batches: Sequence[Any],
    rates: Sequence[float],
    loss_of: Callable[[Any], Any],
) -> list[float]:
    """Return the loss of each batch, after each of which clipped AdamW changes the weights that learn.

    Decay is on matrices only, and not on the scales of their rounding.
    """
    import torch

    torch.set_num_threads(1)
    learning = [(name, weight) for name, weight in weights if weight.requires_grad]
    decays = {name: weight.ndim > 1 and not name.endswith("log_scale") for name, weight in learning}
    groups = [
        {"params": [weight for name, weight in learning if decays[name] is decayed], "weight_decay": decay}
        for decayed, decay in ((True, optimizer.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=(optimizer.b1, optimizer.b2), eps=optimizer.eps)
    losses = []
    for batch, rate in zip(batches, rates, strict=True):
        loss = loss_of(batch)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weight for _, weight in learning], optimizer.clip)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        losses.append(float(loss.detach()))
    return losses
