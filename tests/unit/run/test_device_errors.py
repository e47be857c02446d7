"""Failures of devices, with the messages that jax raises."""

from __future__ import annotations

import jax
import pytest

from forerun.run.device_errors import device_error, user_error_of

H100 = "NVIDIA H100 80GB HBM3"
BUFFERS = """RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:  372.76MiB"""
ALLOCATOR = "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device ordinal 0"
TPU_RUN = (
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 1.50G. That was not possible. There "
    "are 900.00M free.; (0x0x0_HBM0)"
)
TPU_COMPILE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.00G of 15.75G "
    "hbm. Exceeded hbm capacity by 4.25G."
)
NCCL = (
    "INTERNAL: NCCL operation ncclCommInitRank(&comm, nranks, id, rank) failed: unhandled system error (run with "
    "NCCL_DEBUG=INFO for details). Last NCCL warning(error) log entry (may be unrelated) 'Accept failed'."
)
CUDNN = "FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above for more details."


def failure(text: str) -> Exception:
    return jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize(
    ("text", "kind", "devices", "hosts", "machine"),
    [
        (BUFFERS, H100, 8, 1, "h100-8"),
        (BUFFERS, H100, 16, 2, "h100-8x2"),
        (ALLOCATOR, "NVIDIA GeForce RTX 4090", 1, 1, "4090-1"),
        (TPU_RUN, "TPU v6 lite", 8, 1, "v6e-8"),
        (TPU_COMPILE, "TPU v5 lite", 8, 1, "v5e-8"),
        (BUFFERS, "NVIDIA of tomorrow", 3, 1, "SLICE"),
    ],
)
def test_full_memory_names_the_plan_for_the_machine(
    text: str, kind: str, devices: int, hosts: int, machine: str
) -> None:
    error = device_error(failure(text), kind, devices, hosts)
    assert error is not None
    assert error.code == "E-RUN-088"
    assert f"forerun plan JOB --on {machine} " in error.fix
    assert error.why.splitlines()[0] == text.splitlines()[0]
    assert ("nvidia-smi" in error.why) == ("NVIDIA" in kind)


def test_nccl_is_an_error_of_the_user_on_one_host_only() -> None:
    alone = device_error(failure(NCCL), H100, 8, 1)
    assert alone is not None
    assert alone.code == "E-RUN-089"
    assert alone.why.startswith("NCCL operation ncclCommInitRank")
    assert device_error(failure(NCCL), H100, 16, 2) is None, "another host may have failed first: restart"


def test_a_broken_installation() -> None:
    error = device_error(failure(CUDNN), H100, 8, 2)
    assert error is not None
    assert error.code == "E-RUN-090"
    assert CUDNN in error.why
    assert "nvidia-smi" in error.fix
    assert device_error(failure(CUDNN), "cpu", 1, 1) is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(BUFFERS),
        MemoryError(),
        failure("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"),
        failure("RESOURCE_EXHAUSTED: too many requests to the bucket"),
    ],
)
def test_other_failures_stay_as_they_are(error: Exception) -> None:
    assert device_error(error, H100, 8, 1) is None


def test_train_asks_only_about_failures_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    found = user_error_of(failure(BUFFERS), hosts=1)
    assert found is not None
    assert found.code == "E-RUN-088"
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("the devices may not be open yet"))
    assert user_error_of(OSError(BUFFERS), hosts=1) is None
