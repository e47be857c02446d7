"""The child process that asks the TPU compiler. Reads a question on stdin, leaves its answers in a folder.

`facts.json` says what the program's arguments are; the compiler itself writes the scheduled program and
its memory report (XLA_FLAGS=--xla_dump_to) before it generates code. The parent ends this process as
soon as they are there, so nothing after `compile` is promised to run. Should the parent be gone first,
its end of stdin closes, and this process leaves and takes the folder with it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.models.plugin import use_job_folder
from forerun.plan.question import Question, from_json

FACTS, ERROR = "facts.json", "error.json"
REMOVE = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"


def program_for(question: Question) -> Any:
    """The Program that `train` would run on that slice, or the Recording of `cache`, built on its topology."""
    from jax.experimental import topologies

    from forerun.models.registry import model_of
    from forerun.models.teacher import teacher_section
    from forerun.program.build import build, make_mesh
    from forerun.program.recording import build_recording

    model = model_of(question.job.model)
    derived = question.derived(model.heads)
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=question.slice.topology, **question.slice.topology_options
    )
    mesh = make_mesh(derived.mesh, topology.devices[: question.devices])
    if question.recording:
        return build_recording(question.job, model_of(teacher_section(question.job)), model.vocab, mesh, derived.mesh)
    return build(question.job, model, mesh, derived)


def argument_groups(program: Any) -> list[str]:
    """What each flat argument of the step is, in order: weights, optimizer or batch."""
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
    """The shape of each weight as one device holds it."""
    import jax

    params = program.state.params if hasattr(program, "state") else program.params
    return [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params)]


def saved_bytes(program: Any) -> int:
    """Of one checkpoint: each array once. A recording has none."""
    import jax

    if not hasattr(program, "state"):
        return 0
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.saved(program.state)))


def main(folder: Path) -> int:
    asked = sys.stdin.readline()
    if not asked:  # the parent was gone before it could ask
        shutil.rmtree(folder, ignore_errors=True)
        return 1
    question = from_json(asked)
    threading.Thread(target=_leave_with_parent, args=(folder,), daemon=True).start()
    try:
        _compile(question, folder)
    except UserError as error:
        _leave(folder / ERROR, {"what": error.what, "why": error.why, "fix": error.fix})
        return UserError.exit_code
    except Exception as error:
        _leave(folder / ERROR, _failure(error))
        return 1
    return 0


def _compile(question: Question, folder: Path) -> None:
    from forerun.program.build import program_hash

    program = program_for(question)
    lowered = program.trace().lower()
    facts = {
        "arguments": argument_groups(program),
        "program": program_hash(lowered),
        "mesh": str(question.mesh_shape()),
        "weights": local_weights(program),
        "saved_bytes": saved_bytes(program),
        "layers": getattr(getattr(program.model, "config", None), "layers", None),
        "flops_per_step": program.flops_per_step,
        "tokens_per_step": program.tokens_per_step,
    }
    _leave(folder / FACTS, facts)
    lowered.compile(compiler_options=program.compiler_options)


def _failure(error: Exception) -> dict[str, str]:
    """The compiler's own words, or an exception with the line that raised it."""
    from jax.errors import JaxRuntimeError

    if isinstance(error, JaxRuntimeError):
        return {"compiler": str(error)}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "an unknown place"
    return {"failure": f"{type(error).__name__}: {error}", "where": where}


def _leave(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: the parent looks for it all the time."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content), "utf-8")
    draft.rename(path)


def _leave_with_parent(folder: Path) -> None:
    """The compiler's threads write into the folder to the last: they end as this process becomes one that removes it.

    Not by sys.stdin, whose lock this thread would hold when the interpreter ends.
    """
    while os.read(0, 1 << 12):
        pass
    try:
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", REMOVE, str(folder)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


if __name__ == "__main__":
    use_job_folder(Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    sys.exit(main(Path(sys.argv[1])))
