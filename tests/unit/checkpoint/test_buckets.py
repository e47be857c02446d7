"""Checkpoints in buckets of both services, with emulators. The store runs in its own process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from emulated_buckets import emulated_buckets

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from forerun.storage.folder import FileRange, create_once
from forerun.storage.open_folder import folder_at
from forerun.checkpoint.parts import FilePart, read_parts, write_parts
from forerun.checkpoint.reader import Reader
from forerun.checkpoint.store import CheckpointStore, TakenOver
from forerun.checkpoint.reader import newest_step

address, told = sys.argv[1], {}
state = {"w": jnp.arange(4096.0).reshape(64, 64), "step": jnp.int32(0)}
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
place = folder_at(address)
told["created"] = [create_once(place, "one", content) for content in (b"1", b"2", b"1")]
told["read"] = place.read("one").decode()
place.remove("one"), place.remove("one")
ends = [b"a\\r", b"a\\n", b"a\\r\\n", b"\\r\\n\\r\\na"]
for content in ends:
    place.create("ends", content)
    told.setdefault("exact", []).append(place.read("ends") == content)
    place.remove("ends")
told["empty"] = [place.names(), place.names("none"), Reader(address).newest()]

store = CheckpointStore(address, keep=2, owner="first")
for step in (1, 2, 3):
    store.save(step, state | {"step": jnp.int32(step)}, {"step": step})
store.wait()
told["steps"], told["record"], told["folders"] = store.steps(), store.record(3), place.names()
found = store.restore_newest(like)
told["equal"] = bool((found.state["w"] == state["w"]).all()) and int(found.state["step"]) == found.step == 3

class Content:
    size = 7
    def read(self, start, end): return b"metrics"[start:end]
parts = write_parts(place, "3-1-9", "metrics", Content(), [FilePart("files/earlier", 3)])
told["parts"] = [parts, place.read(parts[0].name).decode(), b"".join(read_parts(place, parts)).decode()]

second = CheckpointStore(address, keep=2, owner="second")
told["unnamed"] = place.names("files")
store.save(4, state, {})
try:
    store.wait()
except TakenOver as error:
    told["refused"] = error.why
told["after"] = [second.steps(), place.names()]

commit = Reader(address).commit(3)
name = max(commit.files, key=lambda name: commit.files[name][0])
path = f"{commit.folder}/{name}"
body = place.read(path)
flipped = bytearray(body)
flipped[len(body) // 2] ^= 4
told["fallback"] = []
for damaged in (None, body[:-1], body + b"0", bytes(flipped)):
    place.remove(path)
    if damaged is not None:
        place.replace(path, damaged)
    found = second.restore_newest(like)
    told["fallback"].append([found.step, [str(skipped) for skipped in found.skipped], newest_step(address)])
second.save(3, state | {"step": jnp.int32(3)}, {})
second.wait()
told["healed"] = [second.steps(), second.restore_newest(like).skipped, len(place.names())]

place.create("9-5-1/state/d/part", b"of a killed save")
place.create("files/9-5-1-metrics-0", b"of a killed save")
third = CheckpointStore(address, keep=1)
told["leftovers"] = [[name for name in place.names() if name.startswith("9")], place.names("files")]
third.save(10, state, {})
third.wait()
told["kept"] = [third.steps(), place.names(), len(place.inside(Reader(address).commit(10).folder).files()) > 3]

told["pieces"] = []
for size in (0, 1, 999, 1000, 1001, 2000):
    place.replace("sized", bytes(size))
    told["pieces"].append([sum(map(len, place.blocks("sized", start, 1000))) for start in (0, 1000, 2000)])
told["modules"] = sorted({"gcsfs", "s3fs"} & set(sys.modules))
print(json.dumps(told))
"""


@pytest.fixture(scope="module", params=["gs", "s3"])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    missing = [package for package in ("gcp_storage_emulator", "moto") if importlib.util.find_spec(package) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"{missing[0]} is missing, and CI must not skip this", pytrace=False)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    with emulated_buckets(tmp_path_factory.mktemp("bucket")) as buckets:
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, f"{buckets.address(request.param)}/runs/one/checkpoints"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def test_a_name_is_created_once_and_a_lost_answer_is_recognized(told: dict[str, Any]) -> None:
    assert told["created"] == [True, False, True]
    assert told["exact"] == [True] * 4
    assert (told["read"], told["empty"]) == ("1", [[], [], None])


def test_saved_listed_and_restored(told: dict[str, Any]) -> None:
    assert (told["steps"], told["record"], told["equal"]) == ([2, 3], {"step": 3}, True)
    assert told["folders"] == ["2-1-2", "3-1-3", "commits"]


def test_an_owner_that_was_replaced_is_refused_and_leaves_nothing(told: dict[str, Any]) -> None:
    assert "by second" in told["refused"]
    assert told["after"] == [[2, 3], ["2-1-2", "3-1-3", "commits"]]


def test_damage_is_found_and_healed_by_the_next_save(told: dict[str, Any]) -> None:
    reasons = ("is missing", "were committed", "is longer than", "digest differs")
    for (step, (why,), newest), reason in zip(told["fallback"], reasons, strict=True):
        assert (step, newest) == (2, 2)
        assert "step 3" in why
        assert reason in why
    assert told["healed"] == [[2, 3], [], 3]


def test_files_of_a_killed_save_and_of_old_checkpoints_are_removed(told: dict[str, Any]) -> None:
    assert told["leftovers"] == [[], []]
    steps, names, has_files = told["kept"]
    assert steps == [10]
    assert [name.partition("-")[0] for name in names] == ["10", "commits"]
    assert has_files


def test_pieces_end_where_the_object_ends(told: dict[str, Any]) -> None:
    assert told["pieces"] == [[0, 0, 0], [1, 0, 0], [999, 0, 0], [1000, 0, 0], [1000, 1, 0], [1000, 1000, 0]]


def test_no_other_driver_is_imported(told: dict[str, Any]) -> None:
    assert told["modules"] == []


def test_parts_of_the_runs_files_are_stored_and_removed_if_no_checkpoint_names_them(told: dict[str, Any]) -> None:
    assert told["parts"] == [[["files/3-1-9-metrics-0", 7]], "metrics", "metrics"]
    assert told["unnamed"] == []
