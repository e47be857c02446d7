"""What is asked of the compiler: one job on one slice, as text that a child process can read."""

from __future__ import annotations

import json
from dataclasses import dataclass

from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape, check_model, resolve
from forerun.hardware.slices import Slice, slice_named
from forerun.program.derive import Derived, derive


@dataclass(frozen=True)
class Question:
    """The job is concrete: its steps and vocabulary are filled in."""

    job: Job
    slice: Slice

    def mesh_shape(self) -> MeshShape:
        mesh = self.job.mesh
        return resolve(mesh.data, mesh.fsdp, mesh.tp, self.slice.devices)

    def derived(self, heads: int | None) -> Derived:
        shape = self.mesh_shape()
        check_model(shape, heads, self.job.batch, self.job.micro_batch)
        return derive(self.job, shape, None)

    def to_json(self) -> str:
        return json.dumps({"job": self.job.model_dump(mode="json"), "slice": self.slice.name})


def from_json(text: str) -> Question:
    raw = json.loads(text)
    return Question(Job.model_validate_json(json.dumps(raw["job"])), slice_named(raw["slice"]))
