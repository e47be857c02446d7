"""What a worker process does: it compiles a request and writes its results to a folder.

`facts.json` describes the program's arguments. The compiler dumps the scheduled program and its memory report
(XLA_FLAGS=--xla_dump_to) before it generates code. The command kills this process as soon as these files exist, so code
after `compile` may not run. If the command dies first, stdin closes. This process then exits and removes the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.exit_codes import OUR_BUG
from forerun.planner.compile.installed_compilers import compile_only_topology
from forerun.planner.compile.request import CompileRequest, from_json

# Numbers of the fields in xla/pjrt/proto/compile_options.proto.
BUILD_OPTIONS, DEVICE_MEMORY_SIZE = 3, 15
_VARINT, _MESSAGE = 0, 2
FACTS, ERROR = "facts.json", "error.json"
REMOVE = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"


def program_for(question: CompileRequest) -> Any:
    """Return the Program that `train` would run on the slice, or the Recording of `cache`, on the slice's topology."""
    from forerun.program.build import program_of
    from forerun.program.recording import build_recording

    resolved, shape = question.resolved, question.mesh_shape()
    resolved.require_mesh(shape)  # report an impossible mesh before creating the topology
    devices = compile_only_topology(question.slice).devices[: question.devices]
    if question.recording:
        return build_recording(resolved, shape, devices)
    return program_of(resolved, shape, devices)


def argument_groups(program: Any) -> list[str]:
    """Return the group of each flat argument of the step, in order: weights, optimizer or batch."""
    import jax

    from forerun.program.recording import Recording

    if isinstance(program, Recording):
        return ["weights"] * len(jax.tree.leaves(program.params)) + ["batch"] * len(program.rows)
    state = program.state
    counts = (
        ("optimizer", 1),  # the step counter
        ("weights", len(jax.tree.leaves(state.params))),
        ("optimizer", len(jax.tree.leaves((state.optimizer, state.average, state.watch)))),
        ("batch", len(jax.tree.leaves(program.batch))),
        ("optimizer", len(jax.tree.leaves(program.schedule))),
    )
    return [group for group, n in counts for _ in range(n)]


def local_weights(program: Any) -> list[tuple[int, ...]]:
    """Return the shape of each weight's shard on one device."""
    import jax

    params = program.state.params if hasattr(program, "state") else program.params
    return [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params)]


def attention_kernel(question: CompileRequest, program: Any) -> dict[str, str | None] | None:
    """Return the attention kernel of the program and why it is not the platform's own, or None without attention."""
    from forerun.program.kernels import compute_capability, job_attention

    if program.model.heads is None:
        return None
    first = program.mesh.devices.flat[0]
    capability = compute_capability(first)
    choice = job_attention(question.resolved, program.model, first.platform, first.device_kind, capability)
    return {"kernel": choice.kernel.name, "obstacle": choice.obstacle}


def saved_bytes(program: Any) -> int:
    """Return the bytes of one checkpoint, with each array counted once. A recording has no checkpoints: 0."""
    import jax

    if not hasattr(program, "state"):
        return 0
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.saved(program.state)))


def answer(asked: str, folder: Path) -> int:
    """Compile a request in the form of `CompileRequest.to_json`, and return the exit code.

    Stdin is a pipe or a socket whose other end the command holds.
    """
    threading.Thread(target=_end_with_command, args=(folder,), daemon=True).start()
    try:
        _compile(from_json(asked), folder)
    except UserError as error:
        _write_atomically(folder / ERROR, error.parts())
        return UserError.exit_code
    except Exception as error:
        _write_atomically(folder / ERROR, _failure(error))
        return 1
    return 0


def _compile(question: CompileRequest, folder: Path) -> None:
    """Lower the program, write its facts, and compile it."""
    from forerun.models.base import capabilities_of
    from forerun.program.build import program_hash
    from forerun.program.compiler_options import compile_lowered

    program = program_for(question)
    # jax has no default for GPUs here: its platform "gpu" may be CUDA or ROCm.
    lowered = program.trace().lower(**({"lowering_platforms": ("cuda",)} if question.slice.platform == "gpu" else {}))
    facts = {
        "arguments": argument_groups(program),
        "program": program_hash(lowered),
        "mesh": str(question.mesh_shape()),
        "weights": local_weights(program),
        "saved_bytes": saved_bytes(program),
        "layers": capabilities_of(program.model).layers,
        "flops_per_step": program.flops_per_step,
        "tokens_per_step": program.tokens_per_step,
        "attention": attention_kernel(question, program),
    }
    _write_atomically(folder / FACTS, facts)
    gpu = question.slice.platform == "gpu"
    with limited_memory(question.slice.chip.usable_bytes) if gpu else nullcontext():
        compile_lowered(lowered, program.compiler_options)


def _failure(error: Exception) -> dict[str, str]:
    """Return the compiler's message, or an exception with the line of code that raised it."""
    from jax.errors import JaxRuntimeError

    if isinstance(error, JaxRuntimeError):
        return {"compiler": str(error)}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "an unknown place"
    return {"failure": f"{type(error).__name__}: {error}", "where": where}


def _write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Write the file atomically: the command polls for it."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content), "utf-8")
    draft.rename(path)


def _end_with_command(folder: Path) -> None:
    """Wait until the command dies, then remove the folder and exit.

    The compiler's threads may still write to the folder. So this process replaces itself (exec) with one that only
    removes the folder, which ends these threads first.
    """
    # Read the file descriptor: with sys.stdin this thread would hold its lock while the interpreter shuts down.
    with suppress(ConnectionResetError):  # the command died before it read what the fork server sent to it
        while os.read(0, 1 << 12):
            pass
    try:
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", REMOVE, str(folder)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(OUR_BUG)


@contextmanager
def limited_memory(limit_bytes: int) -> Iterator[None]:
    """Let the GPU compiler work with `limit_bytes` of device memory, as in `train`.

    With a GPU, jaxlib passes the limit of its allocator to the compiler, in a field of the compile options that Python
    cannot set (`PyClient::CompileAndLoadIfrtProgram` in jaxlib/py_client.cc). XLA computes values again instead of
    keeping them if the program is near this limit. Without the field, XLA would use 80 % of the device's memory, and
    the planned program could differ from the one that runs. So the field is added to the serialized options.

    If a version of jax lacks the internal function, XLA uses its own limit. tests/aot/test_gpu_plan.py notices that.
    """
    from jax._src import compiler
    from jaxlib import _jax

    own: Any = getattr(compiler, "get_compile_options", None)
    if own is None:
        yield
        return

    def with_limit(*args: Any, **values: Any) -> Any:
        options = own(*args, **values)
        # Protocol buffers merge messages that follow each other.
        return _jax.CompileOptions.ParseFromString(options.SerializeAsString() + memory_field(limit_bytes))

    compiler.get_compile_options = with_limit
    try:
        yield
    finally:
        compiler.get_compile_options = own


def memory_field(limit_bytes: int) -> bytes:
    """Return serialized compile options with only the memory of the device."""
    inner = _varint(DEVICE_MEMORY_SIZE << 3 | _VARINT) + _varint(limit_bytes)
    return _varint(BUILD_OPTIONS << 3 | _MESSAGE) + _varint(len(inner)) + inner


def _varint(value: int) -> bytes:
    """Return a number in the format of protocol buffers: 7 bits per byte, lowest first."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
