"""Messages of jax, XLA, CUDA, cuDNN and NCCL as users reported them or as the plugin prints them here."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from forerun.hardware.devices import _opening_failure
from forerun.hardware.gpu_errors import gpu_cause
from forerun.installation import install_command

has_plugin = pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="jax's CUDA plugin is not installed")

NO_DRIVER = (
    "Unable to initialize backend 'cuda': FAILED_PRECONDITION: No visible GPU devices. "
    "(set JAX_PLATFORMS='' to automatically choose an available backend)"
)
OUTDATED = """Outdated cuSPARSE installation found.
Version JAX was built against: 12200
Minimum supported: 12100
Installed version: 12002
The local installation version must be no lower than 12100."""


@pytest.mark.parametrize(
    ("message", "part_of_why", "part_of_fix"),
    [
        (NO_DRIVER, "driver is not loaded", "docker run --gpus all"),
        ("CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected", "driver is not loaded", "nvidia-smi"),
        (
            "jaxlib/cuda/versions_helpers.cc:90: operation gpuDeviceGetAttribute( &major, "
            "GPU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) failed: CUDA_ERROR_NOT_INITIALIZED",
            "driver is not loaded",
            "nvidia-smi",
        ),
        ("cudaGetDeviceCount failed: CUDA driver version is insufficient for CUDA runtime version", "too old", "580"),
        (
            "Could not create cudnn handle: CUDNN_STATUS_NOT_INITIALIZED\n"
            "Possibly insufficient driver version: 470.182.3",
            "too old",
            "nvidia-smi",
        ),
        (
            "Could not create RepeatBufferKernel: INTERNAL: Failed call to cudaGetFuncBySymbol: no kernel image is "
            "available for execution on the device",
            "generation",
            "compute capability 7.5",
        ),
        ("RuntimeError: Unable to load cuDNN. Is it installed?", "plan", install_command("cuda")),
        (
            "NCCL operation ncclGetUniqueId(&id) failed: Unable to load NCCL library. "
            "Multi-GPU collectives will not work.",
            "NCCL is not installed",
            install_command("cuda"),
        ),
        (OUTDATED, "older than jax's GPU plugin needs", "unset LD_LIBRARY_PATH"),
        (
            "FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above for more details.",
            "cuDNN could not start",
            "end other processes",
        ),
        (
            "Unable to initialize backend 'cuda': INVALID_ARGUMENT: Mismatched PJRT plugin PJRT API version (0.54) and "
            "framework PJRT API version 0.51).",
            "different versions",
            install_command("cuda"),
        ),
        ("No FFI handler registered for cusolver_potrf_ffi", "different versions", install_command("cuda")),
    ],
)
def test_messages_have_a_cause_and_a_fix(message: str, part_of_why: str, part_of_fix: str) -> None:
    cause = gpu_cause(message)
    assert cause is not None
    assert part_of_why in cause.why
    assert part_of_fix in cause.fix
    absence = _opening_failure("gpu", message)
    assert cause.why in absence.why
    assert absence.fix == cause.fix
    assert absence.attached


@pytest.mark.parametrize("message", ["", "INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"])
def test_unknown_messages_have_none(message: str) -> None:
    assert gpu_cause(message) is None


def opened(root: Path, prepare: str = "", **environment: str) -> tuple[str, str]:
    """Open the GPU in a new process that believes that one is attached; return its error and its other output."""
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    code = f"""
from pathlib import Path
from forerun.errors import UserError
from forerun.hardware.devices import ThisMachine, choose
{prepare}
try:
    choose("gpu", None, ThisMachine(Path({str(root)!r})))
except UserError as error:
    print(error)
"""
    without = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=without | environment, check=True
    )
    return done.stdout, done.stderr


@has_plugin
@pytest.mark.skipif(find_spec("nvidia") is not None and find_spec("nvidia.cudnn") is not None, reason="cuDNN is here")
def test_the_plugins_of_plan_cannot_train(tmp_path: Path) -> None:
    error, output = opened(tmp_path)
    assert "[E-HARDWARE-004]" in error
    assert "cuDNN" in error
    assert install_command("cuda") in error.replace("\n       ", " ")
    assert "Traceback" not in output


@has_plugin
@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia*"))), reason="an NVIDIA driver is here")
def test_a_missing_driver(tmp_path: Path) -> None:
    visible = "from jax._src import hardware_utils; hardware_utils.has_visible_nvidia_gpu = lambda: True"
    error, _ = opened(tmp_path, visible, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    assert "[E-HARDWARE-004]" in error
    assert "the NVIDIA driver" in error
    assert "docker run --gpus all" in error
