"""The child process that asks the TPU compiler. Reads a question on stdin, leaves its answers in a folder.

`facts.json` says what the program's arguments are; the compiler itself writes the scheduled program and
its memory report (XLA_FLAGS=--xla_dump_to) before it generates code. The parent ends this process as
soon as they are there, so nothing after `compile` is promised to run.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.plan.question import Question, from_json

FACTS, ERROR = "facts.json", "error.json"


def program_for(question: Question) -> Any:
    """The Program that `train` would run on that slice, built on its topology."""
    from jax.experimental import topologies

    from forerun.models.registry import model_of
    from forerun.program.build import build, make_mesh

    model = model_of(question.job.model)
    derived = question.derived(model.heads)
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=question.slice.topology, **question.slice.topology_options
    )
    return build(question.job, model, make_mesh(derived.mesh, topology.devices), derived)


def argument_groups(program: Any) -> list[str]:
    """What each flat argument of the step is, in order: weights, optimizer or batch."""
    import jax

    state = program.state
    counts = (
        ("optimizer", 1),  # the step counter
        ("weights", len(jax.tree.leaves(state.params))),
        ("optimizer", len(jax.tree.leaves((state.optimizer, state.average)))),
        ("batch", len(jax.tree.leaves(program.batch))),
    )
    return [group for group, n in counts for _ in range(n)]


def main(folder: Path) -> int:
    from jax.errors import JaxRuntimeError

    from forerun.program.build import program_hash

    question = from_json(sys.stdin.read())
    try:
        program = program_for(question)
        started = time.perf_counter()
        traced = program.trace()
        lowered = traced.lower()
        facts = {
            "arguments": argument_groups(program),
            "program": program_hash(lowered),
            "mesh": str(program.derived.mesh),
            "lower_seconds": time.perf_counter() - started,
        }
        (folder / FACTS).write_text(json.dumps(facts))
        lowered.compile(compiler_options=program.compiler_options)
    except UserError as error:
        (folder / ERROR).write_text(json.dumps({"what": error.what, "why": error.why, "fix": error.fix}))
        return UserError.exit_code
    except JaxRuntimeError as error:
        (folder / ERROR).write_text(json.dumps({"compiler": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
