"""The space of a search: nothing in it changes the batch, and nothing that might fit is ruled out."""

from __future__ import annotations

import pytest
from error_assertions import raises_error

from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape, check_model
from forerun.hardware.slices import slice_named
from forerun.models.decoder import Decoder
from forerun.models.sizes import SIZES, decoder_config
from forerun.nn.spec import count
from forerun.planner.search import space as candidates
from forerun.planner.search.lower_bound import footprint
from forerun.planner.search.space import (
    REMATS,
    SIZES_PER_GPU,
    Bounds,
    Space,
    default_search_slices,
    named_exactly,
    slices_like,
    space_of,
)
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB

FREE = Bounds(lambda one: 1.0 * one.chips)


def job(**values: object) -> ResolvedJob:
    return ResolvedJob(
        Job.model_validate({"model": "llama3.1-8b", "data": "nothing", "batch": 24, "steps": 1000, **values})
    )


def space(on: str | None, bounds: Bounds = FREE, **values: object) -> Space:
    return space_of(job(**values), on, bounds)


@pytest.mark.parametrize("name", SIZES)
def test_formulas_agree_with_the_model(name: str) -> None:
    wanted = job(model=name, sequence=8192)
    model = Decoder(decoder_config(wanted.job.model))
    sizes = footprint(wanted)
    assert sizes.parameters == count(model.specs())
    assert sizes.flops == pytest.approx(model.flops_per_token(8192) * 24 * 8192, rel=1e-6)


def test_every_candidate_keeps_the_batch_and_can_be_laid_out() -> None:
    found = space("v6e-*,v5p-8", sequence=8192)
    assert len(found.candidates) > 200
    for one in found.candidates:
        planned = one.changed(found.resolved).job
        assert planned.batch == 24
        assert one.micro_batch * one.accumulation(24) * one.mesh.data_parallel == 24
        assert one.mesh.devices == one.slice.devices
        check_model(one.mesh, 32, planned.batch, planned.micro_batch)


def test_what_was_compiled_and_fits_is_never_ruled_out() -> None:
    """llama3.1-8b on v6e-8 at 3 x 8192: the compiler has accepted all three."""
    left = {(str(one.mesh), one.micro_batch, one.remat) for one in space("v6e-8", sequence=8192).candidates}
    for remat in REMATS[:3]:
        assert ("1x8x1", 3, remat) in left


@pytest.mark.parametrize(
    ("on", "reason", "values"),
    [
        ("v5e-4", candidates.STATE, {}),
        ("v6e-8", candidates.SAVED, {"sequence": 8192}),
        ("v6e-16", candidates.BATCH, {}),
        ("v5p-64", candidates.SPLIT, {"batch": 32}),
        ("v5p-64", candidates.MANY_COPIES, {"batch": 32}),
    ],
)
def test_reasons(on: str, reason: str, values: dict[str, object]) -> None:
    found = space(on, **values)
    assert found.ruled_out[reason] > 0
    assert found.size == len(found.candidates) + sum(found.ruled_out.values())


def test_state_is_ruled_out_only_where_it_is_larger_than_memory() -> None:
    found = space("v5p-8")
    limit = slice_named("v5p-8").chip.usable_bytes or 0
    assert limit > 90 * GIB
    left = {one.mesh for one in found.candidates}
    assert MeshShape(1, 4, 1) in left
    assert MeshShape(4, 1, 1) in left  # 8.03e9 x 12 bytes are 89.7 GiB
    assert MeshShape(4, 1, 1) not in {one.mesh for one in space("v6e-4").candidates}


def test_limits_rule_out_by_what_peak_speed_would_cost() -> None:
    seconds = footprint(job()).lower_bound_seconds(slice_named("v6e-8").chip, 8)
    hours = seconds * 1000 / 3600
    assert space("v6e-8", Bounds(lambda one: 10.0, max_hours=hours * 1.01)).candidates
    assert not space("v6e-8", Bounds(lambda one: 10.0, max_hours=hours * 0.99)).candidates
    assert space("v6e-8", Bounds(lambda one: 10.0, max_usd=hours * 10.1)).candidates
    dear = space("v6e-8", Bounds(lambda one: 10.0, max_usd=hours * 9.9))
    assert set(dear.ruled_out) <= {candidates.MONEY, candidates.BATCH}
    unknown = space("v6e-8", Bounds(lambda one: None, needs_price=True))
    assert unknown.ruled_out[candidates.NO_PRICE] > 0
    assert not unknown.candidates


def test_the_job_as_written_is_in_the_space() -> None:
    remat = {"policy": "named", "keep": ["mlp_up"]}
    found = space("v6e-8", micro_batch=3, remat=remat, sequence=1024, mesh={"tp": 1})
    own = found.as_written["v6e-8"]
    assert own in found.candidates
    assert (str(own.mesh), own.micro_batch, own.remat.keep) == ("1x8x1", 3, ("mlp_up",))
    assert found.size == space("v6e-8", micro_batch=3, sequence=1024).size * 7 / 6


def test_two_spellings_of_a_remat_are_one_candidate() -> None:
    remat = {"policy": "named", "keep": ["attention_out", "layer_in"]}
    assert space("v6e-8", remat=remat).size == space("v6e-8").size


def test_every_candidate_uses_the_devices_that_the_job_asks_for() -> None:
    found = space("v6e-1,v6e-8", model="qwen3-0.6b", devices=2)
    assert {one.mesh.devices for one in found.candidates} == {2}
    assert {one.slice.name for one in found.candidates} == {"v6e-8"}
    assert [reason for one, reason in found.dropped.items() if one.slice.name == "v6e-1"] == [candidates.DEVICES]
    assert {one.slice.devices >= 2 for one in space(None, model="qwen3-0.6b", devices=2).candidates} == {True}
    with raises_error("E-HARDWARE-017", "devices=16", "v6e-8"):
        space("v6e-1,v6e-8", devices=16)


def test_a_mixed_space_has_candidates_of_both_platforms() -> None:
    found = space("v6e-8,h100-8,4090-8")
    assert {one.slice.platform for one in found.candidates} == {"tpu", "gpu"}
    for name in ("v6e-8", "h100-8"):
        assert {one.remat for one in found.by_slice[name]} >= {REMATS[0], REMATS[1], REMATS[2]}
    limit = slice_named("4090-8").chip.usable_bytes
    state = footprint(job()).resting_bytes
    assert {mesh.fsdp * mesh.tp * limit >= state for mesh in {one.mesh for one in found.by_slice["4090-8"]}} == {True}


def test_tensor_parallelism_stays_within_a_machine() -> None:
    values = {"model": "llama3.1-70b", "batch": 64}
    apart, together = space("h100-4x4", **values), space("h100-8x2", **values)
    assert apart.ruled_out[candidates.NODES] > 0
    assert max(one.mesh.tp for one in apart.candidates) == 4
    assert candidates.NODES not in together.ruled_out
    assert max(one.mesh.tp for one in together.candidates) == 8
    assert MeshShape(1, 16, 1) in {one.mesh for one in together.candidates}
    own = space("h100-4x4", mesh={"fsdp": 2, "tp": 8}, **values)
    assert str(own.as_written["h100-4x4"].mesh) == "1x2x8", "the user's own mesh is not ruled out"


def test_a_copy_of_the_weights_in_each_machine_is_tried() -> None:
    found = space("h100-8x8", model="llama3.2-1b", batch=64)
    assert MeshShape(8, 8, 1) in {one.mesh for one in found.candidates}
    assert MeshShape(16, 4, 1) not in {one.mesh for one in found.candidates}


@pytest.mark.parametrize(("kernel", "left"), [("splash", "tpu"), ("cudnn", "gpu")])
def test_a_kernel_of_one_platform_rules_out_the_other(kernel: str, left: str) -> None:
    found = space("v6e-8,h100-8", attention=kernel)
    assert {one.slice.platform for one in found.candidates} == {left}
    assert found.ruled_out[candidates.KERNEL[kernel][1]] > 0


def test_a_platform_without_a_compiler_is_ruled_out_unless_it_is_named() -> None:
    without_gpu = Bounds(lambda one: 1.0, obstacle=lambda one: "not here" if one.platform == "gpu" else None)
    for on in (None, "v6e-*,h100-*"):
        found = space(on, without_gpu)
        assert {one.slice.platform for one in found.candidates} == {"tpu"}
        assert {one.slice.platform for one, reason in found.dropped.items() if reason == "not here"} == {"gpu"}
    named = space("v6e-*,h100-8", without_gpu)
    assert {one.slice.name for one in named.candidates} >= {"v6e-8", "h100-8"}


def test_a_gpu_without_bfloat16_is_ruled_out() -> None:
    found = space("*4-1", model="qwen3-0.6b", batch=4)
    assert {one.slice.name for one in found.candidates} == {"l4-1"}
    assert len({reason for one, reason in found.dropped.items() if one.slice.name == "t4-1"}) == 1
    in_float32 = space("t4-1", model="smollm2-135m", batch=4, precision={"compute": "float32"})
    assert in_float32.candidates


# The slices and GPU machines of a search.


def defaults(**values: object) -> list[str]:
    resolved = ResolvedJob(
        Job.model_validate({"model": "llama3.1-8b", "data": "nothing", "batch": 24, "steps": 1000, **values})
    )
    return [one.name for one in default_search_slices(resolved.job, footprint(resolved))]


def test_sensible_slices_hold_the_state() -> None:
    names = set(defaults())
    assert {"v6e-4", "v6e-8", "v6e-16", "v5p-8"} <= names
    assert "v5e-4" not in names
    assert not any(name.startswith(("v2", "v3")) for name in names)


def test_sensible_machines_hold_the_state() -> None:
    """8.03e9 x 12 bytes are 89.7 GiB: two H100, one H200, eight RTX 4090, eight L4."""
    names = defaults()
    assert [name for name in names if name.startswith("h100")] == ["h100-2", "h100-4"]
    assert [name for name in names if name.startswith("h200")] == ["h200-1", "h200-2"]
    assert [name for name in names if name.startswith("4090")] == ["4090-8"]
    assert [name for name in names if name.startswith("l4-")] == ["l4-8"]
    assert not any(name.startswith(("t4", "h100-pcie")) for name in names)
    assert "h100-1" in defaults(model="qwen3-0.6b")


def test_a_large_job_gets_several_machines() -> None:
    """70.55e9 x 12 bytes are 788 GiB, and eight H100 have 570."""
    names = defaults(model="llama3.1-70b")
    assert [name for name in names if name.startswith("h100")] == ["h100-8x2", "h100-8x4"]
    assert not any(name.startswith(("4090", "l4-")) for name in names), "no speed of their network is known"
    assert len([name for name in names if name.startswith("b200")]) == SIZES_PER_GPU


def test_the_devices_of_the_job_decide() -> None:
    assert "h100-1" not in defaults(model="qwen3-0.6b", devices=2)
    assert "h100-2" in defaults(model="qwen3-0.6b", devices=2)


def test_globs() -> None:
    assert [one.name for one in slices_like("v6e-?")] == ["v6e-1", "v6e-4", "v6e-8"]
    assert [one.name for one in slices_like("v5litepod-8, v5e-8,v6e-1*")] == ["v5e-8", "v6e-1", "v6e-16", "v6e-128"]
    assert [one.name for one in slices_like("h100-?,a100-?0-8")] == [
        "h100-1",
        "h100-2",
        "h100-4",
        "h100-8",
        "a100-40-8",
        "a100-80-8",
    ]
    assert {one.platform for one in slices_like("*-8")} == {"tpu", "gpu"}
    assert [one.name for one in slices_like("H100-8x2,v6e-[14]")] == ["h100-8x2", "v6e-1", "v6e-4"]
    with raises_error("E-PLAN-003"):
        slices_like("v9*")
    with raises_error("E-HARDWARE-019"):
        slices_like("v5e-7")
    with raises_error("E-HARDWARE-020"):
        slices_like("h100-3")


def test_names_without_a_glob() -> None:
    assert named_exactly("H100-8, v6e-*,v5litepod-8") == {"h100-8", "v5e-8"}
    assert named_exactly(None) == set()
