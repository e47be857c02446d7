"""Our reader of safetensors against the safetensors library: good files alike, mutated files alike or refused."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from error_assertions import raises_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from forerun.errors import UserError
from forerun.hub.safetensors import ITEM_BYTES, header_of, open_weights, weight_files

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
SHAPES = ((), (0,), (7,), (3, 0, 2), (2, 3, 4))


def numbers(dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return (np.arange(np.prod(shape, dtype=int)) % 2 + 1).reshape(shape).astype(dtype)


def everything() -> dict[str, np.ndarray[Any, Any]]:
    return {f"{name}{list(shape)}": numbers(dtype, shape) for name, dtype in DTYPES.items() for shape in SHAPES}


def single(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def test_every_dtype_is_known_here() -> None:
    assert set(DTYPES) == set(ITEM_BYTES)
    assert {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


def test_every_dtype_and_shape_reads_back_equal(tmp_path: Path) -> None:
    wanted = everything()
    single(tmp_path, save(wanted, {"format": "np"}))
    with open_weights(tmp_path) as weights:
        assert weights.metadata == {"format": "np"}
        assert set(weights) == set(wanted)
        assert weights.total_bytes == sum(array.nbytes for array in wanted.values())
        for name, array in wanted.items():
            view = weights.view(name)
            assert (view.dtype, view.shape) == (array.dtype, array.shape)
            assert view.tobytes() == array.tobytes()
            assert not view.flags.writeable


def test_a_tensor_at_an_odd_offset(tmp_path: Path) -> None:
    """Allowed by the format, though the library writes none."""
    header = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[3,7]}}'
    )
    number = numbers(ml_dtypes.bfloat16, (2,))
    single(tmp_path, len(header).to_bytes(8, "little") + header + b"abc" + number.tobytes())
    with open_weights(tmp_path) as weights:
        assert weights.view("a").tobytes() == b"abc"
        assert weights.view("b").astype(np.float32).tolist() == [1, 2]


GOOD = save({"a.weight": numbers(np.float32, (2, 3)), "b": numbers(np.int8, (5,)), "c": numbers(np.int64, ())})
HEADER_BYTES = 8 + int.from_bytes(GOOD[:8], "little")
SNIPPETS = (b"{", b"}", b"[", b"]", b",", b":", b'"', b"-", b"1", b"0", b"\\u0000", b" ", b"\xff", b"true", b"9" * 20)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    content = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(HEADER_BYTES + 2, len(content))))
        kind = draw(st.sampled_from(("flip", "insert", "delete", "digit", "cut", "grow")))
        if kind == "flip" and at < len(content):
            content[at] = draw(st.integers(0, 255))
        elif kind == "insert":
            content[at:at] = draw(st.sampled_from(SNIPPETS))
        elif kind == "delete":
            del content[at : at + draw(st.integers(1, 12))]
        elif kind == "digit":
            digits = [index for index, byte in enumerate(content) if 48 <= byte <= 57]
            if digits:
                content[draw(st.sampled_from(digits))] = draw(st.integers(48, 57))
        elif kind == "cut":
            del content[draw(st.integers(0, len(content))) :]
        else:
            content += bytes(draw(st.integers(1, 20)))
    if draw(st.booleans()) and len(content) >= HEADER_BYTES:  # a length that fits the changed header
        content[:8] = (HEADER_BYTES - 8 + len(content) - len(GOOD)).to_bytes(8, "little", signed=True)
    return bytes(content)


@settings(max_examples=400, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutated())
def test_a_mutated_file_reads_as_the_library_reads_it_or_is_refused(tmp_path: Path, content: bytes) -> None:
    path = single(tmp_path / "fuzz", content)
    try:
        with open_weights(path.parent) as weights:
            ours = {
                name: (weights[name].dtype, list(weights[name].shape), weights.view(name).tobytes()) for name in weights
            }
    except UserError as error:
        said = str(error)
    else:
        said = None
    if said is not None:
        assert str(path) in said
        return
    theirs = {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(content)}
    assert ours == theirs


def test_the_library_also_refuses_what_we_refuse_of_the_offsets(tmp_path: Path) -> None:
    """The rule that ranges fill the file exactly is the format's, not ours."""
    for content in (GOOD + b"x", GOOD[:-1], GOOD.replace(b"[0,", b"[1,", 1)):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)
        with pytest.raises(UserError), open(single(tmp_path, content), "rb") as file:
            header_of(file.fileno(), Path(file.name))


def sharded(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    wanted = {"a": numbers(np.float32, (3,)), "b": numbers(np.int8, (4,)), "c": numbers(np.float16, (5,))}
    (folder / "model-1.safetensors").write_bytes(save({"a": wanted["a"], "b": wanted["b"]}))
    (folder / "model-2.safetensors").write_bytes(save({"c": wanted["c"]}))
    weight_map = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    metadata = {"total_size": 26, "format": "pt", "ratio": 1.5, "flag": True}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return wanted


def test_sharded_weights(tmp_path: Path) -> None:
    wanted = sharded(tmp_path)
    assert weight_files(tmp_path) == ["model-1.safetensors", "model-2.safetensors"]
    with open_weights(tmp_path) as weights:
        assert {name: weights.view(name).tolist() for name in weights} == {k: v.tolist() for k, v in wanted.items()}
        assert weights["c"].file == tmp_path / "model-2.safetensors"


def test_links_inside_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """snapshots/commit/file -> blobs/etag, which may itself lead to the blobs that repositories share."""
    folder = tmp_path / "models--acme--tiny" / "snapshots" / "0123"
    blobs, shared = folder.parents[1] / "blobs", tmp_path / "blobs"
    for made in (folder, blobs, shared):
        made.mkdir(parents=True)
    (shared / "xet").write_bytes(GOOD)
    (blobs / "etag").symlink_to("../../blobs/xet")
    (folder / "model.safetensors").symlink_to("../../blobs/etag")
    with open_weights(folder) as weights:
        assert weights.view("b").tolist() == [1, 2, 1, 2, 1]
    (blobs / "etag").unlink()
    (tmp_path / "elsewhere").write_bytes(GOOD)
    (blobs / "etag").symlink_to("../../elsewhere")
    with raises_error("E-HUB-011"):
        open_weights(folder)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    path = single(tmp_path, save({"a": np.zeros(mmap.PAGESIZE, np.uint8)}))
    with open_weights(tmp_path) as weights:
        os.truncate(path, 100)
        with raises_error("E-HUB-036"):
            weights.view("a")


def open_below(folder: Path) -> list[str]:
    """Of this process; what else it opens and closes meanwhile, in other threads for one, does not count."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if name.startswith(str(folder))]


def test_files_are_closed(tmp_path: Path) -> None:
    sharded(tmp_path)
    with open_weights(tmp_path) as weights:
        kept = weights.view("a")
        assert open_below(tmp_path)
    assert kept.tolist() == [1, 2, 1], "a view outlives the close"
    del kept
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    with contextlib.suppress(UserError):
        open_weights(tmp_path)
    assert open_below(tmp_path) == []


RELEASED = """
import sys
from pathlib import Path
from forerun.hub.safetensors import open_weights

def mapped_kib():  # a file in memory (tmpfs) counts as shared
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssFile", "RssShmem")))

with open_weights(Path(sys.argv[1])) as weights:
    weights.view("b").sum()
    before = mapped_kib()
    total = int(weights.view("a").sum(dtype="int64"))
    during = mapped_kib()
    weights.release("a")
    after = mapped_kib()
    assert int(weights.view("a").sum(dtype="int64")) == total
print(during - before, after - before)
"""


def test_released_pages_leave_memory(tmp_path: Path) -> None:
    single(tmp_path, save({"a": np.ones(32 << 20, np.uint8), "b": np.ones(5, np.uint8)}))
    source = str(Path(__file__).resolve().parents[3] / "src")
    ran = subprocess.run(
        [sys.executable, "-c", RELEASED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    during, after = map(int, ran.stdout.split())
    assert during > 30 * 1024
    assert after < 8 * 1024, "but for pages of the program itself"
