"""The slices that are compared when none is named."""

from __future__ import annotations

import pytest
from error_assertions import assert_error
from fit_results import fit_result, resolved

from forerun.errors import UserError
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import requests_of
from forerun.planner.search.default_slices import MAX_COMPILES, DefaultSlice, Needs, default_slices, platforms_of
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB


def job(**values: object) -> ResolvedJob:
    return resolved(**{"batch": 32, **values})


def names(candidates: list[DefaultSlice]) -> list[str]:
    return [one.question.slice.name for one in candidates]


def answered(one: DefaultSlice, fits: bool) -> FitResult:
    return fit_result(one.question, None, fits=fits)


def test_bytes_that_must_be_there() -> None:
    needs = Needs.of(job())
    parameters = 596_049_920  # of the published checkpoint, embeddings tied
    assert needs.state_bytes == parameters * 12
    assert needs.gradient_bytes == parameters * 4
    assert needs.layer_input_bytes_per_sequence == 28 * 1024 * 1024 * 2
    assert Needs.of(job(optimizer={"ema": 0.99})).state_bytes == parameters * 16
    assert Needs.of(job(precision={"params": "bfloat16"})).state_bytes == parameters * 6
    assert Needs.of(job(remat={"policy": "named", "offload": ["layer_in"]})).layer_input_bytes_per_sequence == 0


def test_a_small_job_asks_the_smallest_of_every_generation() -> None:
    choice = default_slices(job(model="smollm2-135m"), ["tpu"])
    assert names(choice.first()) == ["v6e-1", "v5e-1", "v5p-8", "v4-8", "tpu7x-2x2x1", "v3-8", "v2-8"]


TPUS = ["v6e-1", "v5e-1", "v5p-8", "v4-8", "tpu7x-2x2x1"]


def test_a_small_job_asks_one_of_each_gpu_too() -> None:
    choice = default_slices(job(model="smollm2-135m"))
    assert names(choice.first()) == [*TPUS, "h100-1", "a100-80-1", "4090-1", "l4-1"]
    [line] = [line for line in choice.notes(choice.first()) if "--on" in line]
    assert {"h200-1", "b200-1"} <= set(line.split("--on ")[1].split(","))


def test_gpus_without_nvlink_are_only_for_jobs_that_fit_one_gpu() -> None:
    # 8.03B parameters x 16 bytes are 119.7 GiB: two H100 of 71.2 GiB, one H200 of 125.8 GiB.
    choice = default_slices(job(model="llama3.1-8b", micro_batch=1), ["gpu"])
    assert names(choice.first()) == ["h100-2", "a100-80-2", "h200-1", "b200-1"]
    assert [line.split()[0] for line in choice.left_out] == ["4090", "l4"]


def test_a_job_that_is_larger_than_a_machine_takes_several() -> None:
    # 70.55B parameters x 16 bytes are 1,051 GiB, and eight H100 have 569.5 GiB.
    large = job(model="llama3.1-70b", batch=512, micro_batch=1, remat={"policy": "named", "offload": ["layer_in"]})
    choice = default_slices(large, ["gpu"])
    assert names(choice.by_generation["H100"]) == ["h100-8x2", "h100-8x4"]
    assert choice.first()[0].question.slice.hosts == 2


@pytest.mark.parametrize(
    ("device", "platforms"),
    [
        ("auto", ("tpu", "gpu")),
        ("cpu", ("tpu", "gpu")),
        ("tpu", ("tpu",)),
        ("gpu", ("gpu",)),
        (["gpu", "cpu"], ("gpu",)),
        (["gpu", "tpu"], ("tpu", "gpu")),
    ],
)
def test_the_device_of_the_job_restricts_the_platforms(device: object, platforms: tuple[str, ...]) -> None:
    assert platforms_of(job(device=device).job) == platforms


def test_no_gpu_machine_can_run_the_job() -> None:
    with pytest.raises(UserError) as caught:
        default_slices(job(model={"layers": 1024, "embed": 1 << 18, "heads": 1024, "vocab": 512}), ["gpu"])
    assert_error(caught.value, "E-PLAN-011", what="GPU machine", why="b200-8x64")
    # 1,024 layers x 12 x 2^36 parameters x 16 bytes over 512 devices of 178.4 GiB x 0.90
    assert "memory of b200-8x64" in caught.value.fix


def test_a_large_job_starts_where_it_might_fit() -> None:
    choice = default_slices(
        job(model="llama3.1-70b", batch=512, micro_batch=2, remat={"policy": "named", "offload": ["layer_in"]})
    )
    for first, second in choice.by_generation.values():
        assert first.question.slice.chips < second.question.slice.chips
    # 70.55B parameters x 16 bytes over 31.25 GiB are 34 chips at least; the next standard slice has 64.
    assert names(choice.first())[0] == "v6e-64"
    assert any(line.startswith("v2 and v3 (for small jobs only") for line in choice.left_out)


def test_the_second_round_goes_first_where_nothing_fits_yet() -> None:
    choice = default_slices(job())
    first = choice.first()
    verdicts = [answered(one, fits=one.question.slice.name != "v4-8") for one in first]
    more = names(choice.second(verdicts))
    assert more[0] == "v4-16"
    assert len(first) + len(more) <= MAX_COMPILES
    rest = choice.notes([*first, *choice.second(verdicts)])
    assert any("tpu7x-2x2x2" in line for line in rest)


@pytest.mark.parametrize(
    "values",
    [
        {"model": "llama3.1-8b", "sequence": 8192, "batch": 24, "micro_batch": 3},
        {"model": "llama3.1-8b", "sequence": 8192, "batch": 256, "mesh": {"data": 4, "fsdp": 64, "tp": 4}},
        {"batch": 7},
        {"batch": 1, "micro_batch": 1},
        {"micro_batch": 32},
    ],
)
def test_every_candidate_can_be_laid_out_and_keeps_the_batch(values: dict[str, object]) -> None:
    wanted = job(**values)
    choice = default_slices(wanted)
    for own in choice.by_generation.values():
        for one in own:
            requests_of(one.question.resolved, [one.question.slice])  # raises if it cannot
            assert one.question.job.batch == wanted.job.batch
            changed = was_changed(one, wanted)
            assert bool(one.changes) == changed


def was_changed(one: DefaultSlice, wanted: ResolvedJob) -> bool:
    try:
        [plain] = requests_of(wanted, [one.question.slice])
    except UserError:
        return True
    return plain.mesh_shape() != one.question.mesh_shape() or wanted.job.micro_batch != one.question.job.micro_batch


def test_what_was_changed_is_told_as_overrides() -> None:
    choice = default_slices(job(model="llama3.1-8b", sequence=8192, batch=24, micro_batch=3))
    [v5e, _] = choice.by_generation["v5e"]
    assert v5e.question.slice.name == "v5e-16"
    assert v5e.changes == ("mesh.data=1 mesh.fsdp=8 mesh.tp=2",)


def test_a_job_too_large_for_all_has_a_fix() -> None:
    with pytest.raises(UserError, match="no slice") as raised:
        default_slices(job(model="llama3.1-70b", sequence=1 << 20, batch=1))
    assert "v6e" in raised.value.why
    assert "--on" in raised.value.fix


def test_usable_bytes_bound_the_smallest_slice() -> None:
    choice = default_slices(job(model="qwen3-8b", batch=64, micro_batch=1))
    needs = Needs.of(job(model="qwen3-8b", batch=64, micro_batch=1))
    for own in choice.by_generation.values():
        question = own[0].question
        assert needs.per_device_bytes(question) <= (question.slice.chip.usable_bytes or 0)
    assert needs.state_bytes > 90 * GIB


@pytest.mark.parametrize(
    ("values", "fix", "mended"),
    [
        (
            {"batch": 4096 * 1024, "micro_batch": 4096, "sequence": 131_072},
            "with micro_batch=1 it might fit: --on v6e-1",
            {"micro_batch": 1},
        ),
        (
            {"model": "llama3.1-70b", "batch": 7},
            "with batch=256 micro_batch=1 it might fit: --on v6e-64",
            {"batch": 256, "micro_batch": 1},
        ),
    ],
)
def test_the_way_out_leads_out(values: dict[str, object], fix: str, mended: dict[str, object]) -> None:
    with pytest.raises(UserError) as caught:
        default_slices(job(**values), ["tpu"])
    assert caught.value.fix == fix
    assert fix.split()[-1] in names(default_slices(job(**{**values, **mended}), ["tpu"]).first())


def test_a_model_that_is_larger_than_any_slice() -> None:
    with pytest.raises(UserError) as caught:
        default_slices(job(model={"layers": 1024, "embed": 1 << 18, "heads": 1024, "vocab": 512}))
    # 1,024 layers x 12 x 2^36 parameters x 16 bytes over 2,048 devices of 94.75 GiB
    assert "memory of tpu7x-8x8x16" in caught.value.fix


def test_the_comparison_uses_the_devices_that_the_job_asks_for() -> None:
    choice = default_slices(job(devices=2, batch=8))
    found = [one.question for own in choice.by_generation.values() for one in own]
    assert found
    assert {question.mesh_shape().devices for question in found} == {2}
    assert all(question.slice.devices >= 2 for question in found)
