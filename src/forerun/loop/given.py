"""What a run needs from files before its first step: the model's own weights, and those of models beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from forerun.config.schema import Job, Model
from forerun.errors import UserError
from forerun.exchange.match import matches
from forerun.exchange.packed import weights_of
from forerun.exchange.scales import can_be_computed
from forerun.loop.adapter import read_adapter
from forerun.loop.loaded import pretrained_params
from forerun.methods.lora import ADAPTER
from forerun.methods.method import MODEL
from forerun.models.pretrained import is_checkpoint, pretrained
from forerun.models.registry import model_for
from forerun.models.teacher import teacher_section
from forerun.nn.spec import split
from forerun.objectives.distil import TEACHER
from forerun.program.build import Program
from forerun.program.fingerprint import whole_fingerprint
from forerun.program.state import State


def given_of(
    job: Job, program: Program, *, resumes: bool = False, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """By name, each as the program wants it. A run that goes on has its adapters in the checkpoint.

    `tell` gets a line if integers of the model's files cannot be kept.
    """
    sources = {MODEL: job.model} if is_checkpoint(job.model) else {}
    if TEACHER in program.given:
        sources[TEACHER] = require_weights(teacher_section(job))
    given = {name: pretrained_params(section, program.given[name]) for name, section in sources.items()}
    learns = job.qat is not None and job.lora is None and job.qat.scales == "computed"
    if MODEL in given and learns and not resumes and not can_be_computed(given[MODEL]):
        tell(
            f"some integers of {job.model.name} are rounded again: computed scales cannot be those of all groups; "
            "qat.scales: learned with precision.params: float32 keeps them"
        )
    if job.lora is not None and job.lora.start is not None and not resumes:
        params = program.method.objective.own(program.state.params)
        given[ADAPTER] = read_adapter(Path(job.lora.start), job, program.model, params)
    return given


def require_matching_weights(job: Job) -> None:
    """Compare the headers of the weights with config.json, for the model and a teacher that answers in the run.

    Compiling comes next, and takes minutes for a model whose weights do not exist in that form.
    """
    teacher = teacher_section(job) if job.distil is not None and job.distil.cache is None else None
    for section in (job.model, teacher):
        if section is not None and is_checkpoint(section):
            found = pretrained(section, weights=True)
            with weights_of(found) as (weights, _):
                matches(weights, found.family.table, model_for(found.config))


def require_weights(teacher: Model) -> Model:
    if not is_checkpoint(teacher):
        raise UserError(
            f"distil.teacher: {teacher.name} is a size without weights",
            why="it can be planned with, but it has nothing to teach",
            fix="name a checkpoint: owner/name on the hub, or a folder as ./teacher",
        )
    return teacher


def rests_on_files(program: Program) -> bool:
    return any(jax.tree.leaves(program.unsaved))


def base_of(program: Program, state: State) -> str | None:
    """A number for all that is not in the checkpoints, the same on every mesh; None if everything is."""
    if not rests_on_files(program):
        return None

    with jax.set_mesh(program.mesh):
        return f"{int(jax.jit(whole_fingerprint)(split(state.params, program.unsaved)[0])):08x}"


def require_same_base(before: str | None, now: str | None, job: Job) -> None:
    if before != now:
        names = [str(job.model.name), *([job.distil.teacher] if job.distil and not job.distil.cache else [])]
        raise UserError(
            f"the weights of {' or '.join(names)} are not those that the run began with",
            why=f"its checkpoints hold only what learns; the rest comes from the models' files, whose numbers have "
            f"changed (fingerprint {now} now, {before} then)",
            fix="put these files back as they were, or start over with --fresh (the old folder is kept, renamed)",
        )
