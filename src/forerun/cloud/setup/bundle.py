"""The bundle of a job: one tar file that a controller sends to each host by ssh. It is the only way for secrets."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO

from forerun.cloud.deadline import deadline_at
from forerun.cloud.host.settings import AgentSettings
from forerun.cloud.record.entries import AttemptEntry, CloudRun
from forerun.cloud.record.read_entry import write_entry
from forerun.cloud.setup.job_files import JOB_FILE, JobFiles, job_files
from forerun.cloud.setup.requirements import Requirements, locked_requirements
from forerun.cloud.setup.startup import HOST_JOB_FOLDER, planned_python, unit_files
from forerun.cloud.setup.wheel import Wheel, planned_wheel
from forerun.cloud.ssh.keys import attempt_secret
from forerun.errors import UserError
from forerun.files import open_regular

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[A-Za-z0-9_./:=@+,~^-]*")


@dataclass(frozen=True)
class Bundle:
    """The files of a bundle by their path in it. It is written when it is sent, so no copy of the secrets is on disk.

    Attributes:
      files: the content, or the local file that has it.
    """

    files: Mapping[str, bytes | Path]

    def write(self, stream: IO[bytes]) -> None:
        """Write the tar file. The same files give the same bytes, so a delivery can be repeated."""
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as archive:
            for name in sorted(self.files):
                content = self.files[name]
                entry = tarfile.TarInfo(name)
                entry.mode = 0o600
                if isinstance(content, bytes):
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
                else:
                    with _opened(content) as file:
                        entry.size = os.fstat(file.fileno()).st_size
                        archive.addfile(entry, file)

    @cached_property
    def sha256(self) -> str:
        digest = _Digest()
        self.write(digest)  # type: ignore[arg-type]
        return digest.value.hexdigest()


def _opened(file: Path) -> IO[bytes]:
    """Open a local file of the job. The path has no links, so a link at its end replaced the file."""
    try:
        if file.is_symlink():
            raise OSError("a link has replaced it")
        return open_regular(file)
    except OSError as error:
        raise UserError(
            "E-CLOUD-109",
            f"{file} has changed since the files of the job were listed",
            why=error.strerror or str(error),
            fix="restore the file, or run the command again, which lists the files again",
        ) from error


class _Digest:
    """A stream that only computes a hash."""

    def __init__(self) -> None:
        self.value = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.value.update(content)
        return len(content)


def make_bundle(
    run: CloudRun,
    attempt: AttemptEntry,
    job_folder: Path,
    secrets: Mapping[str, str],
    *,
    project: str | None = None,
    local: JobFiles | None = None,
    ready_at: float | None = None,
) -> Bundle:
    """Return what the hosts of an attempt need: forerun, its requirements, the job with its files, and secrets.

    Args:
      job_folder: what paths in the job file are relative to.
      secrets: environment variables of the training, such as HF_TOKEN. They are only in the bundle.
      project: the project of the slice, for the agent; None: the agent asks the metadata server.
      local: the files that the user has agreed to send; None: list them now.
      ready_at: when billing of the slice began; None: the agent asks the API.

    Raises:
      UserError: a local file of the job is too large, a secret cannot be an environment variable, or the running
        forerun is not the one that planned the job.
    """
    wheel, locked = planned_wheel(run), locked_requirements(run.device, planned_python(run))
    if local is None:
        local = job_files(run.job, job_folder, run.arguments, HOST_JOB_FOLDER)
    moved = replace(run, arguments=(*run.arguments, *local.overrides))
    units = {name: text.encode() for name, text in unit_files(moved, attempt.option.hosts).items()}
    secret = attempt_secret(run.folder, attempt.number).encode() + b"\n"
    settings = agent_settings(run, attempt, project, ready_at)
    return machine_bundle(run.job, local, wheel, locked, secret, secrets, settings, units)


def machine_bundle(
    job: str,
    local: JobFiles,
    wheel: Wheel,
    locked: Requirements,
    secret: bytes,
    variables: Mapping[str, str],
    settings: bytes,
    units: Mapping[str, bytes],
) -> Bundle:
    """Return the bundle of a host or of a keeper: the startup script installs both, so the names are the same."""
    files: dict[str, bytes | Path] = {
        wheel.name: wheel.content,
        "requirements.lock": locked.content,
        "secret": secret,
        "environment": environment_file(variables).encode(),
        "agent.json": settings,
        f"job/{JOB_FILE}": job.encode(),
    }
    files |= {f"units/{name}": content for name, content in units.items()}
    files |= {f"job/{file.name}": file.source for file in local.files}
    return Bundle(files)


def environment_file(secrets: Mapping[str, str]) -> str:
    """Return the lines of a file that systemd reads as `EnvironmentFile=`."""
    return "".join(f"{_variable(name)}={_quoted(name, value)}\n" for name, value in sorted(secrets.items()))


def _variable(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise _refusal(name, "a name has letters, digits and underscores")
    return name


def _quoted(name: str, value: str) -> str:
    if any(ord(letter) < 32 or letter == "\x7f" for letter in value):
        raise _refusal(name, "its value has a line break or another control character")
    if _PLAIN.fullmatch(value):
        return value
    return '"' + re.sub(r'([\\"$`])', r"\\\1", value) + '"'


def _refusal(name: str, why: str) -> UserError:
    return UserError(
        "E-CLOUD-034",
        f"{name!r} cannot be an environment variable of the hosts",
        why=why,
        fix=f"set {name} to one line of text, or unset it",
    )


def agent_settings(run: CloudRun, attempt: AttemptEntry, project: str | None, ready_at: float | None) -> bytes:
    """Return the content of agent.json. It has the limit, so that the agent does not depend on the record for it."""
    settings = AgentSettings(
        folder=run.folder,
        attempt=attempt.number,
        hosts=attempt.option.hosts,
        run_name=run.name,
        provider=attempt.option.provider,
        resource=attempt.resource,
        zone=attempt.option.zone,
        project=project,
        export=run.export,
        limit_seconds=attempt.limit_seconds,
        deadline_at=None if ready_at is None else deadline_at(ready_at, attempt.limit_seconds),
    )
    return write_entry(settings)
