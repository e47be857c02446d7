"""Weights that a run reads from files: those of the model, of a teacher and of initial adapters.

Frozen weights are not saved in checkpoints, so a resumed run reads them again. A fingerprint shows if they changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from forerun.errors import UserError
from forerun.methods.lora import ADAPTER
from forerun.methods.method import MODEL
from forerun.models.model_facts import ModelFacts, model_for
from forerun.nn.spec import split
from forerun.objectives.distil import TEACHER
from forerun.program.build import Program
from forerun.program.fingerprint import tree_fingerprint
from forerun.program.state import State
from forerun.reporter import SILENT, Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.trained_model.load_model import pretrained_params
from forerun.trained_model.peft_folder import read_adapter
from forerun.weights_io.match import matches
from forerun.weights_io.packed import weights_of
from forerun.weights_io.scales import can_be_computed


def read_file_weights(
    resolved: ResolvedJob, program: Program, *, resumes: bool = False, reporter: Reporter = SILENT
) -> dict[str, Any]:
    """Return the weights that the program takes from files, by name, on the devices of the program.

    Args:
      resumes: whether the run resumes from a checkpoint, which contains its adapters.
      reporter: receives a warning if the quantized integers in the model's files cannot be kept.
    """
    job = resolved.job
    sources: dict[str, ModelFacts] = {}
    if resolved.model_facts.checkpoint is not None:
        sources[MODEL] = resolved.model_facts
    if TEACHER in program.given:
        assert resolved.teacher is not None
        sources[TEACHER] = require_weights(resolved.teacher)
    given = {name: pretrained_params(facts, program.given[name]) for name, facts in sources.items()}
    if MODEL in given and job.method.recomputes_scales and not resumes and not can_be_computed(given[MODEL]):
        reporter.warn(
            f"some integers of {job.model.name} are rounded again: computed scales cannot reproduce all of its scales; "
            "qat.scales: learned with precision.params: float32 keeps them"
        )
    start = job.method.initial_adapter
    if start is not None and not resumes:
        params = program.method.objective.own(program.state.params)
        given[ADAPTER] = read_adapter(Path(start), resolved, params)
    return given


def require_matching_weights(resolved: ResolvedJob) -> None:
    """Raise if the tensors in the weight files are not those of config.json, for the model and a teacher in the step.

    Reads only the headers of the files. It is called before the compilation, which can take minutes.
    """
    for facts in (resolved.model_facts, resolved.step_teacher):
        if facts is not None and facts.checkpoint is not None:
            checkpoint = facts.downloaded_checkpoint
            with weights_of(checkpoint) as (weights, _):
                matches(weights, checkpoint.family.table, model_for(checkpoint.config))


def require_weights(teacher: ModelFacts) -> ModelFacts:
    """Return the teacher. Raise if it has no weights."""
    if teacher.checkpoint is None:
        raise UserError(
            "E-RUN-028",
            f"distil.teacher: {teacher.section.name} is a size without weights",
            why="it can be used for planning, but not for training",
            fix="name a checkpoint: owner/name on the hub, or a folder as ./teacher",
        )
    return teacher


def has_unsaved_weights(program: Program) -> bool:
    """Return whether checkpoints do not contain all weights, so that a resumed run needs the model's files."""
    return any(jax.tree.leaves(program.unsaved))


def base_of(program: Program, state: State) -> str | None:
    """Return a fingerprint of the weights that checkpoints do not contain, or None if they contain all.

    It does not depend on the mesh.
    """
    if not has_unsaved_weights(program):
        return None

    with jax.set_mesh(program.mesh):
        return f"{int(jax.jit(tree_fingerprint)(split(state.params, program.unsaved)[0])):08x}"


def require_same_base(before: str | None, now: str | None, resolved: ResolvedJob) -> None:
    """Raise if the fingerprint of the frozen weights is not the one that the checkpoint recorded."""
    if before != now:
        models = [resolved.model_facts, *([resolved.step_teacher] if resolved.step_teacher else [])]
        names = " or ".join(str(facts.section.name) for facts in models)
        raise UserError(
            "E-RUN-029",
            f"the weights of {names} are not those that the run started with",
            why=f"its checkpoints contain only the trained weights; the others come from the models' files, which have "
            f"changed (fingerprint {now} now, {before} then)",
            fix="restore the original files, or start over with --fresh (the old folder is kept, renamed)",
        )
