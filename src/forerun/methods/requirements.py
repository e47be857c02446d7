"""What the methods of a job need from its model and its devices. Other combinations are rejected before compiling."""

from __future__ import annotations

from typing import Any

from forerun.errors import UserError
from forerun.hardware.chips import chip_of_device_kind, require_matmul
from forerun.nn.weights.eight_bit import INT32_TERMS, EightBitWeights, Numerics, chosen_matrices
from forerun.objectives.next_token import RouterLosses
from forerun.resolve.resolved_job import ResolvedJob


def require_eight_bits(resolved: ResolvedJob) -> None:
    """Raise a UserError if the job combines `precision.matmul` with something that forerun does not support."""
    job, kind = resolved.job, resolved.job.precision.matmul
    if kind is None:
        return
    key = f"precision.matmul={kind}"
    if job.qat is not None:
        raise UserError(
            "E-METHOD-120",
            f"{key} is not possible with qat",
            why="qat already rounds the weights to the integers of the export; a second rounding would hide this",
            fix="remove precision.matmul or qat",
        )
    if job.lora is not None and job.lora.is_quantized:
        raise UserError(
            "E-METHOD-121",
            f"{key} is not possible with lora.base={job.lora.base}",
            why="the base has a scale per block of inputs, which a product of 8 bits cannot move out of its sum",
            fix="set lora.base=bfloat16, or remove precision.matmul",
        )
    if job.preferences is not None:
        raise UserError(
            "E-METHOD-122",
            f"{key} is not possible with preferences",
            why="the policy would be rounded and its reference not, so that they would differ at the first step",
            fix="remove precision.matmul",
        )
    if resolved.model_facts.experts is not None:
        raise UserError(
            "E-METHOD-123",
            f"{key} is not possible for a model with experts",
            why="most of its products are groups of tokens times experts, which forerun computes without 8 bits",
            fix="remove precision.matmul, or train a model without experts",
        )


def eight_bit_weights(
    resolved: ResolvedJob, specs: Any, platform: str, device_kind: str, device_tokens: int
) -> EightBitWeights | None:
    """Return the weights of the trained model whose products have operands of 8 bits, or None without `matmul`.

    Args:
        resolved: The job.
        specs: The specs of the method's parameters.
        platform: The platform of the devices. A CPU computes the same with float32.
        device_kind: The kind of the devices, as jax names it.
        device_tokens: The tokens of one micro-batch on one device.

    Raises:
        UserError: the devices do not multiply such operands, or the model has no matrix that could have them.
    """
    kind = resolved.job.precision.matmul
    if kind is None:
        return None
    chip = None if platform == "cpu" else chip_of_device_kind(device_kind)
    if chip is not None:
        require_matmul(chip, kind)
    if kind == "int8" and device_tokens > INT32_TERMS:
        raise UserError(
            "E-METHOD-124",
            f"precision.matmul=int8 with {device_tokens} tokens on a device at a time",
            why=f"the gradient of a weight sums over these tokens; above {INT32_TERMS}, 32-bit sums could overflow",
            fix="a smaller micro_batch, a shorter sequence, or mesh.context, which splits sequences",
        )
    matrices = chosen_matrices(specs)
    if not matrices:
        raise UserError(
            "E-METHOD-125",
            f"precision.matmul={kind}: the model has no matrix whose product could have 8 bits",
            why="matrices of layers are specs of forerun.nn.weights.dense.Dense, whose first letter is L",
            fix="remove precision.matmul",
        )
    return EightBitWeights(Numerics(kind, floats=platform == "cpu"), resolved.job.seed, matrices)


def eight_bit_note(resolved: ResolvedJob, weights: EightBitWeights | None) -> str | None:
    """Return a line about the products of 8 bits for the start of a run, or None without them."""
    if weights is None:
        return None
    where = ", computed with float32 on this CPU, which is slower than without it" if weights.how.floats else ""
    count, precision = len(weights.matrices), resolved.job.precision
    return (
        f"precision.matmul: {precision.matmul} for {count} stack{'s' * (count != 1)} of matrices{where}; "
        f"validation uses {precision.compute}"
    )


# ---- Models with experts, and several slices ----


def router_losses(resolved: ResolvedJob) -> RouterLosses:
    """Return the coefficients of the losses of the routers in next-token prediction."""
    job, experts = resolved.job, resolved.model_facts.experts
    if experts is None:
        return RouterLosses()
    published = 0.0 if job.method.trains_adapters else experts.balance_loss
    balance_loss = job.experts.balance_loss
    return RouterLosses(published if balance_loss is None else balance_loss, job.experts.z_loss or 0.0)


def require_experts(resolved: ResolvedJob) -> None:
    """Raise a UserError if the job combines experts with something that forerun does not support."""
    job, experts = resolved.job, resolved.model_facts.experts
    key = job.experts.given
    if experts is None:
        if key is not None:
            raise UserError(
                "E-METHOD-040",
                f"experts.{key} is for a model with experts",
                why=f"{job.model.name or 'the model'} has no routers whose load could be balanced",
                fix=f"remove experts.{key}, or train a model with experts, such as qwen3-30b-a3b",
            )
        return
    if key is not None and (job.objective or job.preferences or job.distil):
        raise UserError(
            "E-METHOD-041",
            f"experts.{key} is not possible with this objective",
            why="only next-token prediction adds the losses of the routers",
            fix=f"remove experts.{key}",
        )
    if job.qat is not None:
        raise UserError(
            "E-METHOD-042",
            "qat is not possible for a model with experts",
            why="forerun does not round the matrices of experts in training",
            fix="remove qat, or train a model without experts",
        )


def require_slices(resolved: ResolvedJob, slices: int) -> None:
    """Raise if the job has a method that does not run on this number of slices."""
    if slices > 1 and resolved.job.preferences is not None:
        raise UserError(
            "E-PROGRAM-011",
            "preferences do not work with several slices",
            why="the reference model of the pairs runs on one slice only",
            fix="use one slice, or remove preferences",
        )
