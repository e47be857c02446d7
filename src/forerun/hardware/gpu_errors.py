"""Causes of failures of GPUs, from the messages of jax, XLA, CUDA, cuDNN and NCCL."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from forerun.installation import install_command


@dataclass(frozen=True)
class GpuCause:
    """The cause of a failure, and its fix."""

    why: str
    fix: str


_INSTALL = "{install}"  # the command, which depends on this installation
_DRIVER = "nvidia-smi shows the driver; CUDA 13 needs driver 580 or newer, CUDA 12 needs 525 or newer"
# In this order: a message may contain several of them, and the first is the most specific.
_CAUSES: tuple[tuple[str, GpuCause], ...] = (
    (
        r"driver version is insufficient|insufficient driver version|CUDA_ERROR_INSUFFICIENT_DRIVER"
        r"|cudaErrorInsufficientDriver|CUDA_ERROR_UNSUPPORTED_PTX_VERSION|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        GpuCause("the NVIDIA driver is too old for jax's CUDA packages, or does not match its own libraries", _DRIVER),
    ),
    (
        r"No visible GPU devices|CUDA_ERROR_NO_DEVICE|no CUDA-capable device"
        r"|no supported devices found for platform CUDA|CUDA_ERROR_NOT_INITIALIZED|cuInit|libcuda\.so",
        GpuCause(
            "CUDA finds no GPU: the NVIDIA driver is not loaded, a container has no access to it, or "
            "CUDA_VISIBLE_DEVICES hides all GPUs",
            f"{_DRIVER}; in a container: docker run --gpus all; unset CUDA_VISIBLE_DEVICES",
        ),
    ),
    (
        r"no kernel image is available|CUDA_ERROR_NO_BINARY_FOR_GPU|cudaErrorNoKernelImageForDevice",
        GpuCause(
            "the packages have no code for this generation of GPUs: the GPU is older or newer than they support",
            "use a GPU with compute capability 7.5 or higher (CUDA 13), or the newest jax for a new GPU",
        ),
    ),
    (
        r"Unable to load NCCL library",
        GpuCause("NCCL is not installed, so GPUs cannot communicate", _INSTALL),
    ),
    (
        r"Unable to load (?:cuDNN|CUDA|cuFFT|cuPTI|cuBLAS|cuSPARSE)|cuDNN not found",
        GpuCause(
            "jax's GPU plugin is installed without NVIDIA's libraries, which is enough for plan but not for training",
            _INSTALL,
        ),
    ),
    (
        r"Outdated (?:cuDNN|CUDA|cuFFT|cuPTI|cuBLAS|cuSPARSE) installation|cuDNN 9\.10\.0 had|cuDNN < 9\.10\.0"
        r"|Found cuDNN version",
        GpuCause(
            "a library of NVIDIA is older than jax's GPU plugin needs; LD_LIBRARY_PATH may name an old copy",
            f"unset LD_LIBRARY_PATH, or: {_INSTALL}",
        ),
    ),
    (
        r"CUDNN_STATUS_\w+|DNN library initialization failed",
        GpuCause(
            "cuDNN could not start: another process uses the GPU's memory, or the driver is too old for cuDNN",
            f"end other processes on the GPU; {_DRIVER}",
        ),
    ),
    (
        r"Mismatched PJRT plugin|not compatible with the installed jaxlib|incompatible with jax version"
        r"|No FFI handler registered|generate_pjrt_gpu_plugin_options",
        GpuCause("jax, jaxlib and the GPU plugin have different versions", _INSTALL),
    ),
)


def gpu_cause(message: str) -> GpuCause | None:
    """Return the cause of a failure of a GPU or of opening it, or None if the message names none that is known."""
    found = next((cause for pattern, cause in _CAUSES if re.search(pattern, message)), None)
    if found is None or _INSTALL not in found.fix:
        return found
    return replace(found, fix=found.fix.replace(_INSTALL, install_command("cuda")))
