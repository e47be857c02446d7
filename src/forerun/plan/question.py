"""What is asked of the compiler: one job on one slice, as text that a child process can read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape, check_model, resolve
from forerun.hardware.slices import Slice, slice_named
from forerun.models.pretrained import config_of
from forerun.models.sizes import is_plugin
from forerun.program.derive import Derived, derive


@dataclass(frozen=True)
class Question:
    """The job is concrete: its steps and vocabulary are filled in."""

    job: Job
    slice: Slice
    recording: bool = False  # not of the job's step, but of its teacher's forward for `forerun cache`

    @property
    def devices(self) -> int:
        """The devices of the slice that the job uses: the first ones, as in `train`. The others are idle."""
        return self.slice.used_devices(self.job.devices)

    @property
    def hosts(self) -> int:
        """The hosts that have devices of the job."""
        return math.ceil(self.devices * self.slice.hosts / self.slice.devices)

    def mesh_shape(self) -> MeshShape:
        mesh, devices = self.job.mesh, self.devices
        place = self.slice.name if devices == self.slice.devices else f"the job, with devices={devices},"
        return resolve(mesh.data, mesh.fsdp, mesh.tp, devices, place)

    def idle_text(self) -> str:
        """Return a sentence about the devices that the job leaves idle, or an empty string."""
        idle = self.slice.devices - self.devices
        if not idle:
            return ""
        return (
            f"{self.slice.name}: the job uses {self.devices} of {self.slice.devices} devices (devices={self.devices}), "
            f"{idle} {'is' if idle == 1 else 'are'} idle; the price is that of the whole slice"
        )

    def derived(self, heads: int | None) -> Derived:
        shape = self.mesh_shape()
        check_model(shape, heads, self.job.batch, self.job.micro_batch)
        return derive(self.job, shape, None)

    def to_json(self) -> str:
        return json.dumps(
            {"job": self.job.model_dump(mode="json"), "slice": self.slice.name, "recording": self.recording}
        )


def from_json(text: str) -> Question:
    raw = json.loads(text)
    return Question(Job.model_validate_json(json.dumps(raw["job"])), slice_named(raw["slice"]), raw["recording"])


def slices_named(names: Sequence[str]) -> list[Slice]:
    """The slices of `--on`, each once."""
    slices = [slice_named(name) for name in names]
    first: dict[str, str] = {}
    for one, name in zip(slices, names, strict=True):
        if one.name in first:
            also = "" if first[one.name] == name else f"; {first[one.name]} and {name} are the same"
            raise UserError(
                f"slice {one.name} is named twice",
                why=f"one compile answers for it{also}",
                fix=f"--on {','.join(dict.fromkeys(one.name for one in slices))}",
            )
        first[one.name] = name
    return slices


@dataclass(frozen=True)
class Impossible:
    """A slice on which the job cannot run at all, and why. It gets a row without figures."""

    slice: Slice
    error: UserError

    @property
    def text(self) -> str:
        fix = self.error.fix.splitlines()
        return f"{self.slice.name} cannot run the job: {self.what}" + (f"; {fix[0]}" if len(fix) == 1 else "")

    @property
    def what(self) -> str:
        return self.error.what.removeprefix(f"{self.slice.name}: ")

    def raised(self) -> UserError:
        """Return the error with the name of the slice."""
        return UserError(f"{self.slice.name}: {self.what}", why=self.error.why, fix=self.error.fix)


def questions_of(job: Job, slices: Sequence[Slice]) -> list[Question]:
    """Return a question for each slice; raise the error of the first slice on which the job cannot run."""
    questions, impossible = possible_questions(job, slices)
    if impossible:
        raise impossible[0].raised()
    return questions


def possible_questions(job: Job, slices: Sequence[Slice]) -> tuple[list[Question], list[Impossible]]:
    """Split `slices` by every check that needs no compiler. `job` is concrete."""
    heads = None if is_plugin(job.model) else config_of(job.model).heads
    questions, impossible = [], []
    for one in slices:
        question = Question(job, one)
        try:
            question.derived(heads)
        except UserError as error:
            impossible.append(Impossible(one, error))
        else:
            questions.append(question)
    return questions, impossible
