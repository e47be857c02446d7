"""Divergence of forerun's LoRA and PEFT's at high learning rates: each in 32 and in 64 bits, on the same batches.

    python bench/lora_rounding.py            # some minutes on two cores; needs torch, transformers and peft

Uses the checkpoint, adapters and batches of tests/contract/test_lora_steps.py, for twenty steps at several learning
rates. If the two computed different functions, they would also differ in 64 bits. forerun has no 64-bit mode: once the
weights are read, this script replaces the name float32 by float64 in jax and in torch. Writes
bench/results/lora_rounding.json and prints the table of docs/how-to/lora.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "contract"))
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from lora_reference import checkpoint, job_in, peft_start, torch_losses, torch_model

HERE = Path(__file__).resolve().parent
RATES = ("4e-3", "1e-2", "3e-2", "1e-1")
LORA = "{rank: 4, base: float32, start: first}"


def ours(folder: Path, rate: str, bits: int) -> dict[str, list[float]]:
    """Return losses and learning rates of forerun's steps."""
    import jax
    import jax.numpy as jnp

    from forerun.hardware.devices import choose
    from forerun.nn import rope
    from forerun.resolve.job_corpus import open_corpus
    from forerun.resolve.resolve_model import resolve_model
    from forerun.run.open_data import batches_of
    from forerun.run.run_devices import program_on
    from forerun.trained_model.base_weights import read_file_weights

    job = job_in(folder, LORA, f"optimizer.lr={rate}")
    resolved = resolve_model(job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    chosen = choose("cpu", 1)
    job, program = resolved.job, program_on(resolved, chosen, corpus.rows.epoch)
    batches = batches_of(resolved, program, corpus)
    state = program.initial_state(job.seed, read_file_weights(resolved, program))
    if bits == 64:
        jax.config.update("jax_enable_x64", True)
        jnp.float32 = jnp.float64  # type: ignore[misc, assignment]
        rope.frequencies = lambda one: one.theta ** (-np.arange(0, one.dims, 2) / one.dims)  # type: ignore[assignment, misc]
        precision = job.precision.model_copy(update={"compute": "float64", "params": "float64"})
        program = program_on(resolved.with_values(precision=precision), chosen, corpus.rows.epoch)
    step, found, rates = jax.jit(program.step), [], []
    state = jax.tree.map(lambda x: widened(x, bits), state)
    for number in range(job.steps or 0):
        batch = jax.tree.map(lambda x: widened(x, bits), batches.batch_at(number))
        with jax.set_mesh(program.mesh):
            state, metrics = step(state, batch, program.schedule)
        found.append(float(metrics.loss))
        rates.append(float(metrics.lr))
    assert metrics.loss.dtype == np.dtype(f"float{bits}")
    assert all(x.dtype == metrics.loss.dtype for x in jax.tree.leaves(state.params))
    return {"losses": found, "rates": rates}


def widened(x: Any, bits: int) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(x, f"float{bits}") if np.issubdtype(x.dtype, np.floating) else jnp.asarray(x)


def theirs(folder: Path, rate: str, bits: int, rates: list[float]) -> list[float]:
    """Return the losses of PEFT + torch."""
    import peft
    import torch

    model: Any = peft.PeftModel.from_pretrained(torch_model(folder / "base"), folder / "first", is_trainable=True)
    torch.nn.utils.clip_grad_norm_ = clip
    if bits == 64:
        model = model.double()
        torch.float32, torch.float, torch.Tensor.float = torch.float64, torch.float64, torch.Tensor.double
        rotary = model.get_base_model().model.rotary_emb
        pairs = np.arange(len(rotary.inv_freq)) / len(rotary.inv_freq)
        theta = json.loads((folder / "base" / "config.json").read_text())["rope_parameters"]["rope_theta"]
        rotary.inv_freq = torch.from_numpy(theta**-pairs)
    return torch_losses(model, job_in(folder, LORA, f"optimizer.lr={rate}"), rates)


def clip(learning: list[Any], largest: float) -> None:
    """Clip gradients as optax does. torch divides by the norm + 1e-6, which dominates the difference in 64 bits."""
    norm = sum(p.grad.square().sum() for p in learning) ** 0.5
    for p in learning:
        p.grad.mul_(largest / max(float(norm), largest))


def run_in_child(*words: str) -> Any:
    """Run this script in a separate process, which isolates its changes of jax and torch, and return its result."""
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measured(folder: Path, rate: str) -> dict[str, Any]:
    losses: dict[str, list[float]] = {}
    for bits in ("32", "64"):
        mine = run_in_child("ours", str(folder), rate, bits)
        losses[f"ours {bits}"] = mine["losses"]
        losses[f"theirs {bits}"] = run_in_child("theirs", str(folder), rate, bits, json.dumps(mine["rates"]))

    def apart(one: str, other: str) -> float:
        return float(np.abs(np.array(losses[one]) / np.array(losses[other]) - 1).max())

    return {
        "lr": rate,
        "ours_and_peft_in_32_bits": apart("ours 32", "theirs 32"),
        "ours_and_peft_in_64_bits": apart("ours 64", "theirs 64"),
        "peft_in_32_and_64_bits": apart("theirs 32", "theirs 64"),
        "ours_in_32_and_64_bits": apart("ours 32", "ours 64"),
        "losses": losses,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = checkpoint(folder / "base", tie_word_embeddings=True)
        peft_start(base, folder / "first", r=4, lora_alpha=16, target_modules="all-linear")
        rows = [measured(folder, rate) for rate in RATES]
    (HERE / "results" / "lora_rounding.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(
        "| learning rate | forerun and PEFT, 32 bits | 64 bits | PEFT in 32 and in 64 bits | forerun in 32 and in 64 |"
    )
    print("| ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(f"| {row['lr']} | " + " | ".join(f"{x:.1e}" for x in [*row.values()][1:5]) + " |")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "ours":
        print(json.dumps(ours(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
    else:
        print(json.dumps(theirs(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[5]))))
