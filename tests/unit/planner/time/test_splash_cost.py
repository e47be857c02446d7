"""The time of splash kernels: cycles per block by hand, cores that share a kernel, and shapes that were not counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.hardware.chips import chip_named
from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.splash_cost import (
    COUNTED,
    BlockCycles,
    KernelShape,
    block_cycles,
    busiest_share,
    kernel_seconds,
    kernel_shape,
    padded_flops,
)

RESULTS = Path(__file__).parents[4] / "bench" / "results" / "kernel_cycles.json"
KINDS = ("forward", "dq", "dkv", "backward")


def test_cycles_of_a_causal_kernel_by_hand() -> None:
    """v5e, 2 x 3 programs of 4 x 4 blocks of 512, of which 10 are on or below the diagonal."""
    machine = chip_model_of(chip_named("v5e"))
    shape = KernelShape("forward", 2, 3, 2048, 2048, 128, 512)
    counted = COUNTED["v5e", 128, 512, "forward"]
    per_program = 10 * counted.main + 4 * counted.per_row + 16 * counted.visit
    assert kernel_seconds(machine, "v5e", shape) == pytest.approx(6 * per_program / machine.clock_hz)


def test_the_matrix_unit_needs_more_cycles_than_the_code_has() -> None:
    """A dkv kernel of v5e gives its unit 4 x 512 x 512 x 128 multiply-adds, of which it does 4 x 128 x 128 a cycle."""
    machine = chip_model_of(chip_named("v5e"))
    shape = KernelShape("dkv", 1, 1, 512, 512, 64, 512)
    counted = COUNTED["v5e", 64, 512, "dkv"]
    assert counted.main < 2048
    cycles = kernel_seconds(machine, "v5e", shape) * machine.clock_hz
    assert cycles == pytest.approx(2048 + counted.visit + counted.per_row, rel=0.002)


@pytest.mark.parametrize(("chip", "head", "width"), [("v5e", 64, 128), ("v5e", 80, 128), ("v5p", 192, 256)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_padded_to_the_matrix_unit(chip: str, head: int, width: int, kind: str) -> None:
    machine = chip_model_of(chip_named(chip))
    narrow, wide = (KernelShape(kind, 2, 8, 4096, 4096, size, 512) for size in (head, width))
    assert padded_flops(machine, narrow) == pytest.approx(padded_flops(machine, wide))
    assert padded_flops(replace(machine, matrix_unit=256), narrow) == pytest.approx(wide.flops * 256 / width)


@pytest.mark.parametrize(
    ("kind", "batch", "heads", "share"),
    [
        ("forward", 1, 8, 1 / 2),
        ("forward", 1, 1, 1),
        ("forward", 3, 4, 1 / 2),
        ("dq", 1, 8, 1),
        ("dkv", 1, 8, 1),
        ("dq", 2, 8, 1 / 2),
        ("dkv", 3, 4, 2 / 3),
        ("dkv", 13, 8, 7 / 13),
    ],
)
def test_two_cores_share_parallel_dimensions(kind: str, batch: int, heads: int, share: float) -> None:
    shape = KernelShape(kind, batch, heads, 1024, 1024, 128, 512)
    assert busiest_share(2, shape) == pytest.approx(share)
    assert busiest_share(1, shape) == 1
    machine = chip_model_of(chip_named("v5p"))
    alone = kernel_seconds(replace(machine, cores=1, matmul_flops=machine.matmul_flops / 2), "v5p", shape)
    assert kernel_seconds(machine, "v5p", shape) == pytest.approx(alone * share)


def test_the_recorded_loops_are_shared_as_computed() -> None:
    rows = [row for row in json.loads(RESULTS.read_text()) if row["chip"] in ("v4", "v5p")]
    assert {row["batch"] for row in rows} >= {1, 2, 3}
    for row in rows:
        shape = KernelShape(row["kind"], row["batch"], 4, 1024, 1024, row["head"], row["block"])
        assert row["share"] == pytest.approx(busiest_share(2, shape), abs=1e-3)


def test_shapes_that_were_not_counted() -> None:
    known = COUNTED["v5e", 128, 512, "dq"]
    assert block_cycles("v5e", 80, 512, "dq") == known, "padded to 128 lanes"
    assert block_cycles("v5e", 128, 1024, "dq") == BlockCycles(4 * known.main, 2 * known.per_row, known.visit)
    wide = block_cycles("v5e", 1024, 512, "dq")
    assert wide is not None
    assert wide.main >= 4 * known.main
    fused = block_cycles("v4", 128, 512, "backward")
    assert fused is not None
    assert fused.main == round(sum(COUNTED["v4", 128, 512, kind].main for kind in ("dq", "dkv")) * 5 / 7)
    assert block_cycles("v3", 128, 512, "dq") is None


def test_a_chip_without_counts_has_the_time_of_its_matrix_unit() -> None:
    machine = chip_model_of(chip_named("v3"))
    shape = KernelShape("dq", 2, 2, 1024, 1024, 128, 512)
    assert kernel_seconds(machine, "v3", shape) == pytest.approx(
        shape.flops / (machine.matmul_flops * machine.matmul_share)
    )


def test_the_table_is_the_recorded_one() -> None:
    for row in json.loads(RESULTS.read_text()):
        if row["batch"] == 2:
            key = row["chip"], row["head"], row["block"], row["kind"]
            assert COUNTED[key] == BlockCycles(row["main"], row["row"], row["visit"])


SPLIT = {"batch": 8, "heads": 4, "sequence": 8192, "keys": 131_072, "head": 128, "block": 512}  # 16 devices


def visible_blocks(device: int, window: int | None) -> int:
    """Blocks with visible scores of a device that has chunk `device` and chunk 31 - `device`, each of 8 blocks."""
    rows = [chunk * 8 + n for chunk in (device, 31 - device) for n in range(8)]
    seen = 256 if window is None else (window + 510) // 512 + 1
    return sum(min(row + 1, seen) for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_every_device_of_the_context_axis_computes_the_same_blocks(kind: str) -> None:
    table = (16, 256)
    for device in range(16):
        assert KernelShape(kind, **SPLIT, table=table).computed == visible_blocks(device, None)
    assert KernelShape(kind, **SPLIT, table=table).visits == 16 * 256


@pytest.mark.parametrize(("kind", "table", "visits"), [("forward", (16, 3), 48), ("dkv", (6, 256), 6 * 256)])
def test_a_window_of_1024_has_three_blocks_of_keys_for_each_block_of_queries(
    kind: str, table: tuple[int, int], visits: int
) -> None:
    shape = KernelShape(kind, **SPLIT, table=table)
    assert (shape.visits, shape.computed) == (visits, visible_blocks(3, 1024))


def test_seconds_of_a_split_kernel_by_hand() -> None:
    """v5e, 32 programs: 2,056 blocks with work, all visits, and the ends of 16 rows of blocks of queries."""
    machine, counted = chip_model_of(chip_named("v5e")), COUNTED["v5e", 128, 512, "forward"]
    cycles = 2056 * counted.main + 16 * counted.per_row + 16 * 256 * counted.visit
    seconds = kernel_seconds(machine, "v5e", KernelShape("forward", **SPLIT, table=(16, 256)))
    assert seconds == pytest.approx(32 * cycles / machine.clock_hz)


# Splash kernels as both compilers write them: what is read from one, and its FLOPs counted block by block.

Q = "bf16[4,16,1024,128]{3,2,1,0:T(8,128)(2,1)}"
KV = "bf16[4,8,1024,128]{3,2,1,0:T(8,128)(2,1)}"
DQ_FUSED = "bf16[4,2,16,1024,128]{4,3,2,1,0:T(8,128)(2,1)}"
RESIDUAL = "f32[4,16,1024,128]{3,2,1,0:T(8,128)}"
METADATA = {
    "fwd": r"\"block_q\": 512, \"block_kv\": 256, \"block_q_dkv\": 256, \"block_q_dq\": null",
    "dkv": r"\"block_q_dkv\": 512, \"block_kv_dkv\": 512, \"block_kv_dkv_compute\": 256",
    "dq": r"\"block_q_dq\": 512, \"block_kv_dq\": 512",
}


def scratch(block: int) -> str:
    return f"f32[4,{block},128]{{2,1,0:T(8,128)}}"


def shape_of(name: str, outputs: list[str], metadata: str = "", q: str = Q, kv: str = KV) -> KernelShape | None:
    text = f"""HloModule m

ENTRY %main () -> () {{
  %mask = s8[1,2,2]{{2,1,0:T(4,128)(4,1)}} parameter(0)
  %q = {q} parameter(1)
  %k = {kv} parameter(2)
  %v = {kv} parameter(3)
  %segments = s32[4,1024,128]{{2,1,0:T(8,128)}} parameter(4)
  %{name} = ({", ".join(outputs)}) custom-call(%mask, %mask, %q, %k, %v, /*index=5*/%segments), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{{metadata}}}"
}}}}, metadata={{op_name="jit(step)/attention/pallas_call"}}
}}
"""  # noqa: E501
    main = parse(text).computations["main"]
    return kernel_shape(main, main.by_name[name])


FWD = "splash_mha_fwd_segmented_residuals.2", "fwd"
DKV = "splash_mha_dkv_segmented_no_residuals.1", "dkv"
DQ = "splash_mha_dq_segmented_no_residuals.1", "dq"


@pytest.mark.parametrize("with_scratch", [True, False], ids=["scratch among the outputs", "no scratch"])
@pytest.mark.parametrize(
    ("kernel", "outputs", "kind"),
    [(FWD, [Q, RESIDUAL], "forward"), (DKV, [KV, KV], "dkv"), (DKV, [DQ_FUSED, KV, KV], "backward"), (DQ, [Q], "dq")],
)
def test_kind_sizes_and_block(kernel: tuple[str, str], outputs: list[str], kind: str, with_scratch: bool) -> None:
    name, metadata = kernel
    arrays = [scratch(512), scratch(512), *outputs] if with_scratch else outputs
    shape = shape_of(name, arrays, METADATA[metadata])
    assert shape is not None
    assert (shape.kind, shape.programs, shape.sequence, shape.keys, shape.head) == (kind, 4 * 16, 1024, 1024, 128)
    assert shape.block == 512


def test_scratch_as_long_as_the_sequence_makes_no_fused_backward() -> None:
    shape = shape_of(DKV[0], [scratch(1024), scratch(1024), KV, KV], METADATA["dkv"].replace("512", "1024"))
    assert shape is not None
    assert shape.kind == "dkv"


def test_other_kernels() -> None:
    assert shape_of("my_kernel.3", [Q]) is None


@pytest.mark.parametrize(("sequence", "block"), [(1024, 512), (2048, 512), (4096, 1024), (1024, 1024)])
def test_flops_by_visiting_blocks(sequence: int, block: int) -> None:
    """Causal: a block of queries meets the blocks of keys up to its own."""
    blocks = sequence // block
    visited = sum(1 for row in range(blocks) for column in range(blocks) if column <= row)
    for kind, matmuls in (("forward", 2), ("dq", 3), ("dkv", 4), ("backward", 5)):
        shape = KernelShape(kind, 2, 3, sequence, sequence, 128, block)
        assert shape.flops == pytest.approx(matmuls * 6 * visited * 2 * block * block * 128)
