from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from error_assertions import raises_error

from forerun.errors import UserError
from forerun.hardware.chips import Chip, chips
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.program import kernels

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("tpu", "TPU v5 lite", "splash"),
        ("tpu", "TPU v6 lite", "splash"),
        ("tpu", "TPU v3", "xla"),
        ("gpu", H100, "cudnn"),
        ("cpu", "cpu", "xla"),
    ],
)
def test_auto_takes_the_device_s_own(platform: str, kind: str, name: str) -> None:
    assert kernels.attention("auto", platform, kind, "bfloat16").kernel.name == name


def test_generations_have_their_own_blocks() -> None:
    def kernel(kind: str) -> kernels.Kernel:
        return kernels.attention("auto", "tpu", kind, "bfloat16").kernel

    assert kernel("TPU v6 lite") == kernels.Kernel("splash", 2048, True)
    assert kernel("TPU v5 lite") == kernel("TPU v5") == kernel("TPU7x") == kernels.Kernel("splash", 512, True, 2048)
    assert kernel("TPU v4") == kernels.Kernel("splash")


@pytest.mark.parametrize(
    ("wanted", "platform", "kind", "compute", "why"),
    [
        ("splash", "cpu", "cpu", "bfloat16", "splash is a kernel for TPUs, the device is a CPU"),
        ("cudnn", "tpu", "TPU v5 lite", "bfloat16", "cudnn is a kernel for GPUs, the device is a TPU"),
        ("splash", "tpu", "TPU v2", "bfloat16", "the matrix unit of TPU v2 takes no bfloat16"),
        ("cudnn", "gpu", "NVIDIA L4", "float32", "takes bfloat16, and precision.compute is float32"),
    ],
)
def test_a_kernel_that_the_device_lacks(wanted: str, platform: str, kind: str, compute: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        kernels.attention(wanted, platform, kind, compute)
    assert why in caught.value.why
    assert caught.value.fix == "set attention=auto"


def test_auto_on_a_gpu_in_float32_takes_what_runs() -> None:
    assert kernels.attention("auto", "gpu", "NVIDIA L4", "float32").kernel.name == "xla"


def test_a_soft_cap_is_not_cudnn_s() -> None:
    capped = Decoder(DecoderConfig(2, 32, 2, 2, 16, 64, 64, attention_softcap=50.0))
    assert kernels.attention("auto", "gpu", H100, "bfloat16", capped).kernel.name == "xla"
    assert kernels.attention("auto", "tpu", "TPU v5 lite", "bfloat16", capped).kernel.name == "splash"
    with pytest.raises(UserError, match="no soft cap"):
        kernels.attention("cudnn", "gpu", H100, "bfloat16", capped)


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [
        ((7, 5), kernels.Kernel("xla")),
        ((8, 0), kernels.Kernel("xla")),
        ((8, 9), kernels.Kernel("xla")),
        ((9, 0), kernels.Kernel("cudnn", largest_head=256)),
        ((10, 0), kernels.Kernel("cudnn", largest_head=128)),
        ((10, 3), kernels.Kernel("cudnn", largest_head=128)),
        ((12, 0), kernels.Kernel("xla")),
        (None, kernels.Kernel("xla")),
    ],
)
def test_cudnn_needs_a_gpu_with_packed_sequences(capability: tuple[int, int] | None, kernel: kernels.Kernel) -> None:
    found = kernels.attention("auto", "gpu", "NVIDIA of tomorrow", "bfloat16", capability=capability)
    assert found.kernel == kernel
    assert (found.obstacle is None) == (kernel.name == "cudnn")


@pytest.mark.parametrize(("text", "expected"), [("9.0", (9, 0)), ("12.0", (12, 0)), ("gfx942", None), (None, None)])
def test_the_compute_capability_is_the_device_s(text: str | None, expected: tuple[int, int] | None) -> None:
    assert kernels.compute_capability(SimpleNamespace(compute_capability=text)) == expected
    assert kernels.compute_capability(jax.devices("cpu")[0]) is None


@pytest.mark.parametrize("chip", [chip for chip in chips() if chip.gpu], ids=lambda chip: chip.name)
def test_the_table_has_the_capability_of_each_gpu(chip: Chip) -> None:
    assert chip.gpu is not None
    capability = chip.gpu.compute_capability
    for kind in chip.gpu.device_kinds:
        by_table = kernels.attention("auto", "gpu", kind, "bfloat16")
        assert by_table == kernels.attention("auto", "gpu", kind, "bfloat16", capability=capability)


def test_split_sequences_need_a_kernel_that_starts_at_any_query() -> None:
    """Splash also needs chunks of a multiple of 128 positions. `auto` then takes xla, and says why."""
    on_tpu = [kernels.attention("auto", "tpu", "TPU v5 lite", "bfloat16", chunk=chunk) for chunk in (256, 200)]
    assert [choice.kernel.name for choice in on_tpu] == ["splash", "xla"]
    assert [bool(choice.obstacle) for choice in on_tpu] == [False, True]
    on_gpu = kernels.attention("auto", "gpu", H100, "bfloat16", chunk=256)
    assert on_gpu.kernel.name == "xla"
    assert on_gpu.obstacle
    with raises_error("E-PROGRAM-003"):
        kernels.attention("cudnn", "gpu", H100, "bfloat16", chunk=256)


@pytest.mark.parametrize(
    ("kind", "mib"), [("cpu", 512), ("NVIDIA H100 80GB HBM3", 512), ("TPU v5 lite", 1008), ("TPU v6 lite", 2000)]
)
def test_chunks_of_the_loss_have_a_share_of_a_tpu_s_memory(kind: str, mib: int) -> None:
    """v5e has 15.75 GiB and v6e 31.25 GiB for a program."""
    assert kernels.logits_bytes(kind) == mib << 20


def test_the_matrix_unit_of_v6e_rotates_queries_and_keys() -> None:
    assert kernels.rope_by_product("TPU v6 lite")
    assert not kernels.rope_by_product("TPU v5 lite")
