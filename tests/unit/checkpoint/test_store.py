from __future__ import annotations

import dataclasses
import errno
import logging
import math
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_assertions import raises_error
from jax.sharding import NamedSharding, PartitionSpec

from forerun.checkpoint.log import Commit
from forerun.checkpoint.manifest import manifest_of
from forerun.checkpoint.reader import Reader
from forerun.checkpoint.store import CheckpointStore, Retention, SaveFailed, TakenOver
from forerun.errors import UserError
from forerun.storage import folder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    optimizer: Any
    key: Any
    label: str = dataclasses.field(default="static", metadata={"static": True})


def made(seed: int = 0) -> State:
    """A trained-looking state: no leaf is zero, so that a default would be seen."""
    keys = jax.random.split(jax.random.key(seed), 3)
    layer = Layer(jax.random.normal(keys[0], (2, 8, 16)), jax.random.normal(keys[1], (16,)).astype(jnp.bfloat16))
    params = {"layers": layer, "absent": None}
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))
    with jax.numpy_dtype_promotion("standard"):  # Optax itself is not strict
        _, optimizer = chain.update(params, chain.init(params), params)
    return State(jnp.asarray(7, jnp.int32), params, optimizer, jax.random.key_data(keys[2]))


def like(tree: Any, sharding: Any = None) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree)


def assert_same_bits(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def folders(folder: Path) -> list[str]:
    """All but the log."""
    return sorted(path.name for path in folder.iterdir() if path.name != "commits")


def ended(store: CheckpointStore) -> None:
    """Return when nothing goes on in the background, without asking the store."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(60)


def failing_for(folder: Path, real: Any) -> Any:
    def failing(path: Path, *arguments: Any) -> None:
        if path == folder or path.parent == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        real(path, *arguments)

    return failing


@contextmanager
def files_of_at_most(limit_bytes: int) -> Iterator[None]:
    """Every write beyond the limit fails in the kernel, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_state_and_record_come_back_with_types_and_bits(tmp_path: Path) -> None:
    state, record = made(), {"data": {"step": 3}, "program": "3f2a", "share": 0.1}
    with CheckpointStore(tmp_path / "checkpoints", keep=2) as store:
        assert store.newest() is None
        store.save(3, state, record)
    with CheckpointStore(tmp_path / "checkpoints", keep=2) as store:
        assert (store.steps(), store.newest()) == ([3], 3)
        assert store.record(3) == record
        restored = store.restore(3, like(state))
    assert isinstance(restored, State)
    assert isinstance(restored.optimizer[1][0], optax.ScaleByAdamState)
    assert_same_bits(restored, state)


def test_restore_onto_other_shardings(tmp_path: Path) -> None:
    assert jax.device_count() == 8
    wide, tall = jax.make_mesh((8,), ("fsdp",)), jax.make_mesh((2, 4), ("data", "tp"))
    state = made()

    def spread(mesh: jax.sharding.Mesh, spec: PartitionSpec) -> Any:
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: NamedSharding(mesh, spec) if x.shape == (2, 8, 16) else whole, state)

    saved = jax.device_put(state, spread(wide, PartitionSpec(None, "fsdp")))
    target = spread(tall, PartitionSpec("data", None, "tp"))
    wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, target)
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(1, saved, {})
        store.wait()
        restored = store.restore(1, wanted)
        alone = store.restore(1, like(state))
    assert restored.params["layers"].kernel.sharding == target.params["layers"].kernel
    assert restored.params["layers"].kernel.addressable_shards[0].data.shape == (1, 8, 4)
    assert_same_bits(restored, state)
    assert_same_bits(alone, state)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep=2) as store:
        for step in (5, 20, 100):
            store.save(step, {"x": jnp.full(3, step)}, {"step": step})
        store.wait()
        assert store.steps() == [20, 100]
        restored = store.restore(20, {"x": jax.ShapeDtypeStruct((3,), jnp.int32, sharding=jnp.ones(3).sharding)})
        assert restored["x"].tolist() == [20, 20, 20]
        assert store.record(20) == {"step": 20}


def test_the_saved_state_may_be_donated_at_once(tmp_path: Path) -> None:
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {"x": jnp.zeros((512, 1024), jnp.int32)}
    with CheckpointStore(tmp_path, keep=4) as store:
        for number in range(4):
            store.save(number, state, {})
            state = step(state)
        store.wait()
        for number in range(4):
            assert (np.asarray(store.restore(number, like(state))["x"]) == number).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: dataclasses.replace(s, key=jnp.ones(3, jnp.uint32)),
            "key: uint32[2] in the checkpoint, uint32[3] in",
        ),
        (lambda s: dataclasses.replace(s, step=jnp.ones(())), "step: int32[] in the checkpoint, float32[] in"),
        (
            lambda s: dataclasses.replace(s, params={"layers": s.params["layers"], "new": jnp.ones(1)}),
            "params.new: nothing in the checkpoint, float32[1] in",
        ),
        (
            lambda s: dataclasses.replace(s, optimizer=s.optimizer[:1]),
            "optimizer.1.0.count: int32[] in the checkpoint, nothing in",
        ),
    ],
)
def test_another_model_is_named_by_its_first_differing_leaf(tmp_path: Path, change: Any, words: str) -> None:
    state = made()
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(1, state, {})
        store.wait()
        with raises_error("E-CHECKPOINT-008") as error:
            store.restore(1, like(change(state)))
    assert words in error.value.why


def test_a_failed_save_is_raised_by_the_next_call_and_leaves_the_rest_intact(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": jax.random.normal(jax.random.key(0), (512, 512))}
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, state, {})
    store.wait()
    for call in (lambda: store.save(3, state, {}), store.wait, store.close):
        with files_of_at_most(1 << 16):
            store.save(2, state, {})
            with raises_error("E-CHECKPOINT-017", "2") as error:
                call()
        assert "from step 1" in error.value.fix
        assert store.steps() == [1]
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(2, state, {})
        store.wait()
        assert store.steps() == [1, 2]
        assert_same_bits(store.restore(2, like(state)), state)
    assert len(folders(tmp_path)) == 2, "nothing is left of the failed saves"
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_saving_goes_on_after_a_failure(tmp_path: Path) -> None:
    state = {"x": jax.random.normal(jax.random.key(0), (512, 512))}
    with CheckpointStore(tmp_path, keep=2) as store:
        with files_of_at_most(1 << 16):
            store.save(2, state, {})
            with pytest.raises(UserError):
                store.wait()
        store.save(2, state, {"second": True})
        store.wait()
        assert store.record(2) == {"second": True}


def test_a_missing_checkpoint_is_told(tmp_path: Path) -> None:
    state = {"x": jnp.ones(4)}
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(1, state, {})
        store.save(2, state, {})
        store.wait()
        with raises_error("E-CHECKPOINT-003", "9") as error:
            store.restore(9, like(state))
        assert "1, 2" in error.value.why


def test_check_raises_a_failure_as_soon_as_it_is_there_and_removes_its_files(tmp_path: Path) -> None:
    state = {"x": jax.random.normal(jax.random.key(0), (512, 512))}
    with CheckpointStore(tmp_path, keep=2) as store:
        store.check()
        store.save(1, state, {})
        store.wait()
        store.check()
        with files_of_at_most(1 << 16):
            store.save(2, state, {})
            ended(store)
        assert len(folders(tmp_path)) == 1, "removed before the failure is told"
        with pytest.raises(SaveFailed, match=r"2.*E-CHECKPOINT-017"):
            store.check()
        store.check()
        store.save(2, state, {})
        store.wait()
        assert_same_bits(store.restore(2, like(state)), state)


def test_a_failure_of_the_record_itself_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its writing, and of making its name last, when whether it would is not known."""
    state = {"x": jnp.ones(4)}
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(1, state, {})
        store.wait()
        for name in ("_write", "sync_folder"):
            with monkeypatch.context() as patch:
                patch.setattr(folder, name, failing_for(tmp_path / "commits", getattr(folder, name)))
                store.save(2, state, {})
                with pytest.raises(SaveFailed, match=r"2.*E-CHECKPOINT-017") as error:
                    store.wait()
            assert "Input/output error" in error.value.why
            assert (store.steps(), len(folders(tmp_path))) == ([1], 1)
        store.save(2, state, {})
        store.wait()
        assert store.steps() == [1, 2]
        assert [path.name for path in (tmp_path / "commits").iterdir() if path.suffix != ".json"] == []


def test_an_owner_that_was_replaced_cannot_commit(tmp_path: Path) -> None:
    """Whether it wakes up between two saves or in the middle of one; and the new one's files are not touched."""
    state = {"x": jnp.ones(4)}
    first = CheckpointStore(tmp_path, keep=1, owner="first")
    first.save(1, state, {})
    first.wait()
    second = CheckpointStore(tmp_path, keep=1, owner="second")
    assert second.fence > first.fence
    first.save(2, state, {})
    with pytest.raises(TakenOver, match=r"2.*E-CHECKPOINT-012") as error:
        first.wait()
    assert "by second" in error.value.why
    assert (first.steps(), second.steps(), len(folders(tmp_path))) == ([1], [1], 1)
    second.save(2, state, {"by": "second"})
    second.wait()
    for _ in range(3):
        first.save(2, state, {"by": "first"})
        with pytest.raises(TakenOver):
            first.wait()
    second.save(3, state, {"by": "second"})
    second.close()
    assert (second.steps(), second.record(3), len(folders(tmp_path))) == ([3], {"by": "second"}, 1)


@pytest.mark.parametrize("read", [True, False])
def test_an_owner_replaced_while_its_save_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """It sleeps when its arrays are whole and the record is all that is missing: the worst moment. Or before its files
    are read again, which the new owner removes then: that is no trouble of the disk, and is not told as such."""
    state, asleep, awake = {"x": jnp.ones(4)}, threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Any:
        files = manifest_of(*arguments) if read else None
        asleep.set()
        assert awake.wait(60)
        return files or manifest_of(*arguments)

    first = CheckpointStore(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr("forerun.checkpoint.store.manifest_of", slowly)
        first.save(7, state, {})
        assert asleep.wait(60)
    second = CheckpointStore(tmp_path, keep=1)
    second.save(5, state, {})
    second.wait()
    awake.set()
    with pytest.raises(TakenOver):
        first.wait()
    assert (second.steps(), len(folders(tmp_path))) == ([5], 1)


def test_looking_takes_nothing_over(tmp_path: Path) -> None:
    state = {"x": jnp.ones(4)}
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(1, state, {})
        store.wait()
        before = sorted((tmp_path / "commits").iterdir())
        reader = Reader(tmp_path)
        assert_same_bits(reader.restore(1, like(state)), state)
        assert reader.restore_newest(like(state)) is not None
        assert sorted((tmp_path / "commits").iterdir()) == before
        store.save(2, state, {})
        store.wait()
        assert reader.steps() == [1, 2]


def test_leftovers_of_former_owners_are_removed_and_nothing_else(tmp_path: Path) -> None:
    state = {"x": jnp.ones(4)}
    with CheckpointStore(tmp_path, keep=2) as store:
        store.save(1, state, {})
    ours = ("9-1-7", "9-1-7.orbax-checkpoint-tmp", "commits/000000000002.json.0a1b2c3d.part")
    foreign = ("notes", "9-77-1", "9", "old-1-1-1")
    for name in (*ours, *foreign):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    part = tmp_path / ours[2]
    shutil.rmtree(part)
    part.write_text("half a rec")
    CheckpointStore(tmp_path, keep=2).close()
    assert {path.name for path in tmp_path.iterdir()} == {"1-1-1", "commits", *foreign}
    assert not part.exists()


def test_what_lay_ahead_of_a_rewind_goes_with_the_next_save(tmp_path: Path) -> None:
    """Newest is the highest commit number, whatever the steps and the files' times are."""
    with CheckpointStore(tmp_path, keep=3) as store:
        for step in (10, 20, 30):
            store.save(step, {"x": jnp.full(3, step)}, {"life": 1})
        store.wait()
        for path in tmp_path.rglob("*"):
            os.utime(path, (2e9, 2e9))
        store.save(20, {"x": jnp.full(3, 21)}, {"life": 2})
        store.wait()
        assert (store.newest(), store.steps(), store.record(20)) == (20, [10, 20], {"life": 2})
        assert store.restore(20, like({"x": jnp.full(3, 0)}))["x"].tolist() == [21] * 3
    assert len(folders(tmp_path)) == 2


def test_the_best_and_every_so_many_stay(tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: math.nan, 50: 4.0, 60: 2.5}
    with CheckpointStore(tmp_path, keep=Retention(last=1, every=30, best=1)) as store:
        for step, loss in losses.items():
            store.save(step, {"x": jnp.ones(2)}, {"loss": loss})
        store.wait()
        assert store.steps() == [20, 30, 60]
    assert len(folders(tmp_path)) == 3


def test_folders_of_steps_without_records_are_named_and_left_alone(tmp_path: Path) -> None:
    for name in ("100", "200-3-1"):
        folder = tmp_path / name
        (folder / name).mkdir(parents=True)
        with raises_error("E-CHECKPOINT-005") as error:
            CheckpointStore(folder, keep=1)
        assert name in error.value.why
        assert [path.name for path in folder.iterdir()] == [name]


def test_other_users_of_the_same_log_are_heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CheckpointStore(tmp_path, keep=1).close()
    logging.getLogger("absl").warning("not from the store")
    assert [record.getMessage() for record in caplog.records] == ["not from the store"]


def kept(retention: Retention, *steps: int, losses: tuple[object, ...] = ()) -> list[int]:
    records = [{"loss": loss} for loss in losses] or [{}] * len(steps)
    commits = [
        Commit(number, 1, step, str(step), {}, record)
        for number, (step, record) in enumerate(zip(steps, records, strict=True), 2)
    ]
    return [commit.step for commit in retention.kept(commits)]


def test_the_last() -> None:
    assert kept(Retention(2)) == []
    assert kept(Retention(2), 5) == [5]
    assert kept(Retention(2), 5, 10, 15) == [10, 15]


def test_every_so_many_steps() -> None:
    assert kept(Retention(1, every=10), 5, 10, 15, 20, 25) == [10, 20, 25]


def test_the_best_are_the_lowest_finite_figures_and_of_equal_ones_the_newer() -> None:
    losses = (2.0, 1.0, None, float("nan"), 1.0, "low", 3.0)
    assert kept(Retention(1, best=1), 1, 2, 3, 4, 5, 6, 7, losses=losses) == [5, 7]
    assert kept(Retention(1, best=3), 1, 2, 3, 4, 5, 6, 7, losses=losses) == [1, 2, 5, 7]
    assert kept(Retention(1, best=5), 1, 2, losses=(None, None)) == [2]


def test_another_figure() -> None:
    commits = [Commit(n, 1, n, "", {}, {"loss": n, "other": -n}) for n in (1, 2, 3)]
    assert [c.step for c in Retention(1, best=1, figure="loss").kept(commits)] == [1, 3]
    assert [c.step for c in Retention(1, best=1, figure="other").kept(commits)] == [3]


def test_what_lies_ahead_of_the_newest_goes() -> None:
    assert kept(Retention(3, every=10), 10, 20, 30, 20) == [10, 20]
    assert kept(Retention(3), 10, 20, 30, 40, 25) == [10, 20, 25]
