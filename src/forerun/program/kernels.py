"""Per device: which attention kernel with which blocks, and the compiler's options.

One table for `plan` and `train`, so that what was planned is what runs. Each line says where it is from.
"""

from __future__ import annotations

from forerun.errors import UserError
from forerun.nn.attention import Kernel

BY_PLATFORM = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}
RUNS_ON = {"splash": ("tpu",), "cudnn": ("gpu", "cuda")}  # xla runs anywhere

# v6e has the vector memory for long blocks and one fused backward kernel. Compiled for llama3.1-8b on v6e-8 and
# simulated: blocks of 512 unfused 5.1 s a step, this 3.4 s (bench/plan_targets.py compiles the same job).
_V6E_SPLASH = Kernel("splash", block=2048, fused_backward=True)
_OPTIONS: dict[str, dict[str, str]] = {
    # Gathers of weights run beside the matmuls that do not need them. On v5e only: elsewhere the compiler of
    # libtpu 0.0.50 refuses this fusion, as it may give wrong results or hang; older ones take it without a word.
    "TPU v5 lite": {
        "xla_tpu_enable_async_collective_fusion": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
        "xla_enable_async_all_gather": "true",
    },
    "TPU v6 lite": {
        "xla_tpu_scoped_vmem_limit_kib": "98304",
        "xla_tpu_enable_windowed_einsum_for_all_gather": "false",
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": "false",
    },
}
# The matrix unit of v2 and v3 takes no bfloat16 operand from Mosaic: the splash kernel does not compile.
_WITHOUT_SPLASH = ("TPU v2", "TPU v3")


def attention(wanted: str, platform: str, device_kind: str, compute: str, model: object = None) -> Kernel:
    """The kernel the job wants, or the device's best for `auto`; `model` may need what a kernel does not have."""
    capped = getattr(getattr(model, "config", None), "attention_softcap", None) is not None
    if wanted == "auto":
        wanted = BY_PLATFORM.get(platform, "xla")
        if _obstacle(wanted, platform, device_kind, compute, capped):
            wanted = "xla"
    elif obstacle := _obstacle(wanted, platform, device_kind, compute, capped):
        raise UserError(f"attention: {wanted} does not run here", why=obstacle, fix="set attention=auto")
    if wanted == "splash" and device_kind == "TPU v6 lite":
        return _V6E_SPLASH
    return Kernel(wanted)  # type: ignore[arg-type]


def _obstacle(name: str, platform: str, device_kind: str, compute: str, capped: bool) -> str | None:
    """Why a kernel cannot run on a device, or None."""
    if platform not in RUNS_ON.get(name, (platform,)):
        return f"{name} is a kernel for {RUNS_ON[name][0].upper()}s, the device is a {platform.upper()}"
    if name == "splash" and device_kind in _WITHOUT_SPLASH:
        return f"the matrix unit of {device_kind} takes no bfloat16 operand from the kernel language"
    if name == "cudnn" and capped:
        return "cuDNN's attention has no soft cap on its scores, which this model has"
    if name == "cudnn" and compute != "bfloat16":
        return f"cuDNN's attention takes bfloat16, and precision.compute is {compute}"
    return None


def compiler_options(platform: str, device_kind: str) -> dict[str, str]:
    """For `compile`. A generation without a line compiles with the compiler's own defaults."""
    return dict(_OPTIONS.get(device_kind, {})) if platform == "tpu" else {}
