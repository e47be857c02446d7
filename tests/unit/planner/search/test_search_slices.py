"""The slices and GPU machines of a search."""

from __future__ import annotations

from error_assertions import raises_error

from forerun.config.schema import Job
from forerun.planner.search.lower_bound import footprint
from forerun.planner.search.search_slices import SIZES_PER_GPU, default_search_slices, named_exactly, slices_like
from forerun.resolve.resolved_job import ResolvedJob


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
