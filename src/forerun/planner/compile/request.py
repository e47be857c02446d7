"""Compile requests: one job on one slice, in a form that a child process can read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.chips import require_compute_dtype, require_matmul
from forerun.hardware.mesh import MeshShape, require_one_slice, resolve, slices_of
from forerun.hardware.slices import Slice, slice_named
from forerun.models.model_facts import ModelOutline
from forerun.resolve.derive import Derived
from forerun.resolve.resolved_job import ResolvedJob


@dataclass(frozen=True)
class CompileRequest:
    """A request to compile one job for one slice."""

    resolved: ResolvedJob
    slice: Slice
    recording: bool = False  # compile the teacher's forward pass for `forerun cache` instead of the training step

    @property
    def job(self) -> Job:
        """The job, with its steps and vocabulary filled in."""
        return self.resolved.job

    @property
    def devices(self) -> int:
        """The devices of the slice that the job uses: the first ones, as in `train`. The others are idle."""
        return self.slice.used_devices(self.job.devices)

    @property
    def hosts(self) -> int:
        """The hosts that have devices of the job."""
        return math.ceil(self.devices * self.slice.hosts / self.slice.devices)

    def mesh_shape(self) -> MeshShape:
        """Return the job's mesh with -1 resolved to a size; raise if the mesh does not match the devices."""
        if self.recording:
            require_one_slice(self.slice.slices, self.slice.name)
        mesh, devices = self.job.mesh, self.devices
        place = self.slice.name if devices == self.slice.devices else f"the job, with devices={devices},"
        slices = slices_of(
            mesh.slices, self.slice.slices, self.slice.platform, self.job.devices, self.slice.name, mesh.min_slices
        )
        return resolve(mesh.data, mesh.fsdp, mesh.tp, devices, place, slices, context=mesh.context, expert=mesh.expert)

    def idle_text(self) -> str:
        """Return a sentence about the devices that the job leaves idle, or an empty string."""
        idle = self.slice.devices - self.devices
        if not idle:
            return ""
        return (
            f"{self.slice.name}: the job uses {self.devices} of {self.slice.devices} devices (devices={self.devices}), "
            f"{idle} {'is' if idle == 1 else 'are'} idle; the price is for the complete slice"
        )

    def derived(self) -> Derived:
        """Return the values derived from the job and the slice; raise if the job cannot run on it."""
        require_compute_dtype(self.slice.chip, self.job.precision.compute)
        require_matmul(self.slice.chip, self.job.precision.matmul)
        return self.resolved.derived(self.mesh_shape())

    def to_json(self) -> str:
        """Return the request as one line of JSON, which `from_json` reads."""
        base = self.resolved.base
        return json.dumps(
            {
                "job": self.job.model_dump(mode="json"),
                "base": None if base is None else {"folder": str(base.folder), "label": base.label},
                "slice": self.slice.name,
                "recording": self.recording,
            }
        )


def from_json(text: str) -> CompileRequest:
    """Return the request that `to_json` wrote."""
    raw = json.loads(text)
    job = Job.model_validate_json(json.dumps(raw["job"]))
    base = None if raw["base"] is None else ModelOutline(Path(raw["base"]["folder"]), raw["base"]["label"])
    return CompileRequest(ResolvedJob(job, base), slice_named(raw["slice"]), raw["recording"])


def slices_named(names: Sequence[str]) -> list[Slice]:
    """Return the slices that `--on` names; raise if a slice is named twice."""
    slices = [slice_named(name) for name in names]
    first: dict[str, str] = {}
    for one, name in zip(slices, names, strict=True):
        if one.name in first:
            also = "" if first[one.name] == name else f"; {first[one.name]} and {name} are the same"
            raise UserError(
                "E-PLAN-012",
                f"slice {one.name} is named twice",
                why=f"each slice is compiled once{also}",
                fix=f"--on {','.join(dict.fromkeys(one.name for one in slices))}",
            )
        first[one.name] = name
    return slices


@dataclass(frozen=True)
class Impossible:
    """A slice on which the job cannot run, and the error. Reports show it as a row without figures."""

    slice: Slice
    error: UserError

    @property
    def text(self) -> str:
        """A sentence for the notes of a report, with the fix if it is one line."""
        fix = self.error.fix.splitlines()
        return f"{self.slice.name} cannot run the job: {self.what}" + (f"; {fix[0]}" if len(fix) == 1 else "")

    @property
    def what(self) -> str:
        """The error's first part without the name of the slice."""
        return self.error.what.removeprefix(f"{self.slice.name}: ")

    def raised(self) -> UserError:
        """Return the error with the name of the slice and its own code."""
        return UserError(self.error.code, f"{self.slice.name}: {self.what}", why=self.error.why, fix=self.error.fix)


def requests_of(resolved: ResolvedJob, slices: Sequence[Slice]) -> list[CompileRequest]:
    """Return a request for each slice; raise the error of the first slice on which the job cannot run."""
    questions, impossible = possible_requests(resolved, slices)
    if impossible:
        raise impossible[0].raised()
    return questions


def possible_requests(resolved: ResolvedJob, slices: Sequence[Slice]) -> tuple[list[CompileRequest], list[Impossible]]:
    """Split `slices` into those on which the job may run and the others, by all checks that need no compiler."""
    questions, impossible = [], []
    for one in slices:
        question = CompileRequest(resolved, one)
        try:
            question.derived()
        except UserError as error:
            impossible.append(Impossible(one, error))
        else:
            questions.append(question)
    return questions, impossible
