"""The attention kernel for each kind of device.

`plan` and `train` use the same table, so the planned program is the one that runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from forerun.errors import UserError
from forerun.hardware.chips import chip_of_device_kind
from forerun.models.base import Model, capabilities_of
from forerun.nn.attention import Kernel
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB, MIB

SPLASH_LANES = 128  # splash needs blocks whose length is a multiple of it
BY_PLATFORM = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}
RUNS_ON = {"splash": ("tpu",), "cudnn": ("gpu", "cuda")}  # xla runs anywhere

# v6e has enough vector memory for long blocks and a fused backward kernel. llama3.1-8b on v6e-8, compiled and
# simulated: 3.4 s per step, against 5.1 s with blocks of 512 and no fusion (bench/plan_targets.py compiles this job).
_V6E_SPLASH = Kernel("splash", block=2048, fused_backward=True)
# Others compute all gradients of short sequences in one kernel, which has five instead of seven matrix products
# (bench/kernel_cycles.py). It writes a part of the gradient of the queries for each block of keys, and these parts are
# added afterwards. With more than four blocks, this traffic takes about the time that the kernel saves.
_SHORT_FUSED = Kernel("splash", fused_backward=True, fused_length=2048)
_SPLASH = {"TPU v6 lite": _V6E_SPLASH, **dict.fromkeys(("TPU v5 lite", "TPU v5", "TPU7x"), _SHORT_FUSED)}
# The largest head of cuDNN's backward pass, for each generation of GPUs (the major number of the compute capability) on
# which its flash attention takes packed sequences. cuDNN's frontend checks both (scaled_dot_product_flash_attention.h,
# sdpa_support_surface.h). For generation 12, no public source says that packed sequences work.
_LARGEST_HEADS = {9: 256, 10: 128}
# The devices on which a matrix product rotates queries and keys faster than slices do (`nn/rotation.py`). A step of
# llama3.1-8b on v6e-8 is planned at 2.68 s instead of 2.75 s. v5e has a smaller matrix unit: qwen3-0.6b on v5e-8 would
# take 0.159 s instead of 0.157 s.
_ROPE_BY_PRODUCT = ("TPU v6 lite",)
# Limits of the float32 logits of a chunk of the loss: a share of the memory, and the smallest and the largest limit.
_LOGITS_SHARE, _SMALLEST_LOGITS, _LARGEST_LOGITS = 1 / 16, 512 * MIB, 2 * GIB
# Mosaic cannot pass bfloat16 operands to the matrix unit of v2 and v3, so the splash kernel does not compile there.
_WITHOUT_SPLASH = ("TPU v2", "TPU v3")


@dataclass(frozen=True)
class AttentionChoice:
    """An attention kernel, and why it is not the platform's own one."""

    kernel: Kernel
    obstacle: str | None = None


def attention(
    wanted: str,
    platform: str,
    device_kind: str,
    compute: str,
    model: Model | None = None,
    capability: tuple[int, int] | None = None,
    chunk: int | None = None,
) -> AttentionChoice:
    """Return the attention kernel for a device.

    Args:
      wanted: the job's `attention`: the name of a kernel, or `auto` for the fastest one that can run.
      platform: the platform of the device, for example "tpu".
      device_kind: JAX's name of the device, for example "TPU v6 lite".
      compute: the job's `precision.compute`.
      model: checked for what a kernel does not support, such as a soft cap on the scores.
      capability: the compute capability of a GPU, or None to look it up in the table of GPUs.
      chunk: the length of the chunks into which the mesh splits a sequence, or None if it is not split.

    Raises:
      UserError: the kernel that the job names cannot run.
    """
    missing = None  # what the model has, and cuDNN's attention lacks
    if model is not None and (has := capabilities_of(model)).attention_softcap is not None:
        missing = "soft cap on its scores"
    elif model is not None and has.attention_sinks:
        missing = "sinks"
    chip = chip_of_device_kind(device_kind)
    if capability is None and chip is not None and chip.gpu is not None:
        capability = chip.gpu.compute_capability
    name = BY_PLATFORM.get(platform, "xla") if wanted == "auto" else wanted
    obstacle = _obstacle(name, platform, device_kind, compute, missing, capability) or _split_obstacle(name, chunk)
    if obstacle and wanted != "auto":
        raise UserError("E-PROGRAM-003", f"attention: {name} does not run here", why=obstacle, fix="set attention=auto")
    if obstacle:
        return AttentionChoice(Kernel("xla"), obstacle)
    if name == "splash":
        return AttentionChoice(_SPLASH.get(device_kind, Kernel("splash")))
    if name == "cudnn" and capability is not None:
        return AttentionChoice(Kernel("cudnn", largest_head=_LARGEST_HEADS[capability[0]]))
    return AttentionChoice(Kernel(name))  # type: ignore[arg-type]


def rope_by_product(device_kind: str) -> bool:
    """Return whether a matrix product rotates queries and keys on this kind of device."""
    return device_kind in _ROPE_BY_PRODUCT


def logits_bytes(device_kind: str) -> int:
    """Return the limit of the float32 logits of a chunk of the loss.

    Each chunk reads and writes the float32 gradient of the output matrix: 8 V E bytes for 2 N V E FLOPs, with N rows.
    On a TPU, a chunk needs some thousand rows, or the matrix unit waits for the memory.
    """
    chip = chip_of_device_kind(device_kind)
    if chip is None or not chip.is_tpu:
        return _SMALLEST_LOGITS
    return min(max(int(chip.usable_bytes * _LOGITS_SHARE), _SMALLEST_LOGITS), _LARGEST_LOGITS)


def job_attention(
    resolved: ResolvedJob, model: Model, platform: str, device_kind: str, capability: tuple[int, int] | None = None
) -> AttentionChoice:
    """Return the kernel that a job uses for `model`, its own model or its teacher, on this kind of device."""
    job, context = resolved.job, resolved.job.mesh.context
    chunk = job.sequence // (2 * context) if context > 1 else None
    return attention(job.attention, platform, device_kind, job.precision.compute, model, capability, chunk)


def compute_capability(device: Any) -> tuple[int, int] | None:
    """Return the compute capability of a jax device, or None if it is not a GPU."""
    text = getattr(device, "compute_capability", None)
    if not isinstance(text, str) or not re.fullmatch(r"\d+\.\d+", text):
        return None
    major, minor = text.split(".")
    return int(major), int(minor)


def _split_obstacle(name: str, chunk: int | None) -> str | None:
    """Return why a kernel cannot attend with the chunks of a split sequence, or None if it can."""
    if chunk is None:
        return None
    if name == "cudnn":
        return "cuDNN's attention cannot start at a query inside a sequence, as mesh.context needs"
    if name == "splash" and chunk % SPLASH_LANES:
        return f"splash needs chunks of a multiple of {SPLASH_LANES} tokens, and mesh.context splits into {chunk}"
    return None


def _obstacle(
    name: str, platform: str, device_kind: str, compute: str, missing: str | None, capability: tuple[int, int] | None
) -> str | None:
    """Return why a kernel cannot run on a device, or None if it can."""
    if platform not in RUNS_ON.get(name, (platform,)):
        return f"{name} is a kernel for {RUNS_ON[name][0].upper()}s, the device is a {platform.upper()}"
    if name == "splash" and device_kind in _WITHOUT_SPLASH:
        return f"the matrix unit of {device_kind} takes no bfloat16 operand from the kernel language"
    if name == "cudnn" and missing is not None:
        return f"cuDNN's attention has no {missing}, which this model has"
    if name == "cudnn" and compute != "bfloat16":
        return f"cuDNN's attention takes bfloat16, and precision.compute is {compute}"
    if name == "cudnn" and (capability is None or capability[0] not in _LARGEST_HEADS):
        # Without the name of the device, so that a plan prints the reason once for all such GPUs.
        return "cuDNN's attention for packed documents needs compute capability 9 or 10 (H100, H200, B200)"
    return None
