"""Per device: which attention kernel with which blocks, and the compiler's options.

One table for `plan` and `train`, so that what was planned is what runs. Each line says where it is from.
"""

from __future__ import annotations

from forerun.errors import UserError
from forerun.nn.attention import Kernel

BY_PLATFORM = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn", "cpu": "xla"}
RUNS_ON = {"splash": ("tpu",), "cudnn": ("gpu", "cuda"), "xla": ("tpu", "gpu", "cuda", "cpu")}

# v6e has the vector memory for long blocks and one fused backward kernel: compiled for llama3.1-8b on
# v6e-8, blocks of 2048 with these options took a third off the simulated step against 512 unfused.
_V6E_SPLASH = Kernel("splash", block=2048, fused_backward=True)
_V6E_OPTIONS = {
    "xla_tpu_scoped_vmem_limit_kib": "98304",
    "xla_tpu_enable_windowed_einsum_for_all_gather": "false",
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": "false",
}


# The matrix unit of v2 and v3 takes no bfloat16 operand from Mosaic: the splash kernel does not compile.
_WITHOUT_SPLASH = ("TPU v2", "TPU v3")


def attention(wanted: str, platform: str, device_kind: str) -> Kernel:
    """The kernel the job wants, or the device's best for `auto`."""
    best = "xla" if device_kind in _WITHOUT_SPLASH else BY_PLATFORM.get(platform, "xla")
    name = best if wanted == "auto" else wanted
    if platform not in RUNS_ON[name]:
        raise UserError(
            f"attention: {name} does not run on {platform}",
            why=f"{name} is a kernel for {RUNS_ON[name][0].upper()}s",
            fix="set attention=auto",
        )
    if name == "splash" and device_kind in _WITHOUT_SPLASH:
        raise UserError(
            f"attention: splash does not compile for {device_kind}",
            why="its matrix unit takes no bfloat16 operand from the kernel language",
            fix="set attention=auto",
        )
    if name == "splash" and _is_v6e(device_kind):
        return _V6E_SPLASH
    return Kernel(name)  # type: ignore[arg-type]


def compiler_options(platform: str, device_kind: str) -> dict[str, str]:
    return dict(_V6E_OPTIONS) if platform == "tpu" and _is_v6e(device_kind) else {}


def _is_v6e(device_kind: str) -> bool:
    return device_kind in ("TPU v6 lite", "TPU v6e")
