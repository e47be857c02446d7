from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from error_assertions import raises_error

from forerun.checkpoint.log import Claim, Log
from forerun.checkpoint.reader import (
    Damaged,
    Difference,
    Reader,
    SavedLeaf,
    chosen_step,
    first_difference,
    in_job_form,
    in_saved_form,
    newest_step,
)
from forerun.checkpoint.store import CheckpointStore
from forerun.storage.folder import LocalFolder


def state_of(step: int) -> Any:
    return {"params": {"w": jnp.full((64, 64), step, jnp.float32)}, "step": jnp.int32(step)}


LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with CheckpointStore(folder, keep=3) as store:
        for step in (10, 20, 30):
            store.save(step, state_of(step), {"step": step})
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "checkpoints"))


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def files_of(folder: Path, step: int) -> list[Path]:
    return sorted(path for path in folder.glob(f"{step}-*/**/*") if path.is_file() and path.stat().st_size)


def record_of(folder: Path, number: int) -> Path:
    return folder / "commits" / f"{number:012d}.json"


def restored_step(folder: Path) -> tuple[int, list[int | None]]:
    found = Reader(folder).restore_newest(LIKE)
    assert found is not None
    assert found.step == int(found.state["step"]) == found.record["step"]
    assert (found.state["params"]["w"] == found.step).all()
    return found.step, [skipped.step for skipped in found.skipped]


def test_the_newest_is_restored_when_all_is_well(folder: Path) -> None:
    assert restored_step(folder) == (30, [])
    assert Reader(folder).damage(30) is None


def test_a_flip_in_any_file_is_found_and_passed_over(folder: Path) -> None:
    files = files_of(folder, 30)
    assert len(files) >= 6
    for path in files:
        flip(path)
        assert restored_step(folder) == (20, [30]), path
        found = Reader(folder).damage(30)
        assert found is not None
        assert path.as_posix().endswith(found.file)
        flip(path)
    assert restored_step(folder) == (30, [])


def test_several_in_a_row_are_passed_over_and_told(folder: Path) -> None:
    flip(files_of(folder, 30)[0])
    files_of(folder, 20)[-1].unlink()
    found = Reader(folder).restore_newest(LIKE)
    assert found is not None
    assert found.step == 10
    first, second = map(str, found.skipped)
    assert first.startswith("step 30: ")
    assert "digest differs" in first
    assert second.startswith("step 20: ")
    assert "is missing" in second


def test_none_good_stops_with_the_reasons_and_never_starts_afresh(folder: Path) -> None:
    for step in (10, 20, 30):
        flip(files_of(folder, step)[0])
    with pytest.raises(Damaged, match="E-CHECKPOINT-004") as error:
        Reader(folder).restore_newest(LIKE)
    assert [line[:8] for line in error.value.why.splitlines()[::2]] == ["step 30:", "step 20:", "step 10:"]
    assert "--fresh" in error.value.fix


def test_nothing_there_is_nothing_restored(tmp_path: Path) -> None:
    assert Reader(tmp_path).restore_newest(LIKE) is None
    assert Reader(tmp_path / "missing").restore_newest(LIKE) is None
    CheckpointStore(tmp_path, keep=1).close()
    assert Reader(tmp_path).restore_newest(LIKE) is None


def test_a_run_that_begins_while_it_is_looked_at_is_no_folder_without_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims the folder and begins its first save between two looks of ours: at the records, and at the folders."""
    reader, begun = Reader(tmp_path), list[Claim]()

    list_names = LocalFolder.names

    def names(place: LocalFolder, folder: str = "") -> list[str]:
        if not folder and not begun:
            begun.append(Log(LocalFolder(tmp_path)).claim("the run"))
            (tmp_path / "5-1-1").mkdir()
        return list_names(place, folder)

    monkeypatch.setattr(LocalFolder, "names", names)
    assert (reader.steps(), len(begun)) == ([], 1)


@pytest.mark.parametrize("at", [0, 10, 100, -40, -1])
def test_a_damaged_record_is_passed_over_and_its_files_are_kept_until_the_next_commit(folder: Path, at: int) -> None:
    flip(record_of(folder, 4), at)
    found = Reader(folder).restore_newest(LIKE)
    assert found is not None
    assert (found.step, [skipped.commit for skipped in found.skipped]) == (20, [4])
    with CheckpointStore(folder, keep=3) as store:
        assert list(folder.glob("30-*")) != [], "perhaps a person can still save it"
        store.save(30, state_of(30), {"step": 30})
        store.wait()
    assert len(list(folder.glob("30-*"))) == 1
    assert restored_step(folder) == (30, [])


def test_records_that_changed_places_are_found(folder: Path) -> None:
    one, other = record_of(folder, 3), record_of(folder, 4)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    found = Reader(folder).restore_newest(LIKE)
    assert found is not None
    assert (found.step, [skipped.commit for skipped in found.skipped]) == (10, [4, 3])


def test_restoring_a_damaged_step_by_name_raises(folder: Path) -> None:
    flip(files_of(folder, 30)[0])
    with pytest.raises(Damaged, match=r"30.*E-CHECKPOINT-007") as error:
        Reader(folder).restore(30, LIKE)
    assert "step 20" in error.value.fix


def test_another_model_is_no_reason_to_fall_back(folder: Path) -> None:
    other = {**LIKE, "params": {"w": jax.ShapeDtypeStruct((64, 65), jnp.float32, sharding=LIKE["step"].sharding)}}
    with raises_error("E-CHECKPOINT-008", "30"):
        Reader(folder).restore_newest(other)


def test_weights_alone_are_verified_and_the_newest_good_step_is_named(folder: Path) -> None:
    assert newest_step(folder) == 30
    assert (Reader(folder).restore(30, LIKE["params"], part="params")["w"] == 30).all()
    flip(files_of(folder, 30)[-1])
    assert newest_step(folder) == 20
    with pytest.raises(Damaged):
        Reader(folder).restore(30, LIKE["params"], part="params")
    with raises_error("E-CHECKPOINT-008") as error:
        Reader(folder).restore(20, LIKE["params"], part="average")
    assert "average.w: nothing in" in error.value.why
    with raises_error("E-CHECKPOINT-013"):
        newest_step(folder / "none")


def test_a_checkpoint_is_chosen_by_its_loss_or_its_step(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep=4) as store:
        for step, loss in ((10, 2.0), (20, 1.5), (30, float("nan")), (40, 1.7)):
            store.save(step, state_of(step), {"loss": loss})
    assert [chosen_step(tmp_path, which) for which in ("newest", "best", "10")] == [40, 20, 10]
    with raises_error("E-CHECKPOINT-003", "11"):
        chosen_step(tmp_path, "11")
    with CheckpointStore(tmp_path / "other", keep=1) as store:
        store.save(10, state_of(10), {})
    with raises_error("E-CHECKPOINT-014"):
        chosen_step(tmp_path / "other", "best")


def saved(shape: tuple[int, ...], dtype: Any = "float32") -> SimpleNamespace:
    return SimpleNamespace(shape=shape, dtype=jnp.dtype(dtype))


def test_equal_trees_have_no_difference_whatever_their_containers() -> None:
    job = {"a": (jnp.ones(2), None), "key": jax.random.key(0)}
    assert first_difference({"a": [saved((2,)), None], "key": saved((2,), "uint32")}, job) is None


def test_the_first_in_the_jobs_order_is_named() -> None:
    job = {"a": jnp.ones(2), "b": jnp.ones(3, jnp.bfloat16)}
    found = first_difference({"b": saved((4,)), "a": saved((1,)), "c": saved(())}, job)
    assert found == Difference("a", SavedLeaf((1,), "float32"), SavedLeaf((2,), "float32"))
    found = first_difference({"a": saved((2,)), "b": saved((3,))}, job)
    assert found == Difference("b", SavedLeaf((3,), "float32"), SavedLeaf((3,), "bfloat16"))


def test_leaves_of_one_side_only() -> None:
    assert first_difference({}, {"a": jnp.ones(2)}) == Difference("a", None, SavedLeaf((2,), "float32"))
    assert first_difference({"a": saved((2,))}, {}) == Difference("a", SavedLeaf((2,), "float32"), None)
    assert str(SavedLeaf((2, 3), "bfloat16")) == "bfloat16[2,3]"


def test_places_without_arrays_may_differ() -> None:
    """A newer version has more parameters that only one family has, and they are None in the others."""
    older = {"blocks": {"query": saved((2,)), "bias": None}, "moments": [saved(()), None]}
    job = {"blocks": {"query": "q", "gate": None}, "moments": ("m",), "tail": None}
    form = in_saved_form(older, job)
    assert form == {"blocks": {"query": "q", "bias": None}, "moments": ["m", None]}
    loaded = {"blocks": {"query": 1.0, "bias": None}, "moments": [2.0, None]}
    assert in_job_form(loaded, job) == {"blocks": {"query": 1.0, "gate": None}, "moments": (2.0,), "tail": None}
