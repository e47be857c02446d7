"""The startup script of a rented machine, the instance metadata that contains it, and its systemd units."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from forerun.cloud import labels
from forerun.cloud.host.settings import TRAIN_UNIT
from forerun.cloud.one_line import require_one_line
from forerun.cloud.record.entries import AttemptEntry, CloudRun, Option
from forerun.cloud.setup.requirements import locked_requirements, running_python, uv_requirement
from forerun.cloud.setup.wheel import planned_wheel

TEMPLATE = Path(__file__).parent / "startup.sh"
USER = "forerun"  # the user of ssh connections
BUNDLE_SECONDS = 1800  # how long a machine waits for its job
SETUP_SECONDS = 3600  # after this time without an agent, a machine deletes its slice
# How much later than the agent a machine deletes its slice. The time is counted from its first boot, which may be some
# minutes before the slice is ready and billed.
LIMIT_MARGIN_SECONDS = 300
STARTUP_SCRIPT, SSH_KEYS = "startup-script", "ssh-keys"
_PLACE = re.compile(r"@([A-Z0-9_]+)@")


def startup_script(
    run: CloudRun, option: Option, deletion: Sequence[str] = (), limit_seconds: int | None = None
) -> str:
    """Return the script that root runs at every boot of a machine of `option`.

    It contains no secret. Everyone who may list the project's machines can read it.

    Args:
      deletion: the requests that delete the slice if its setup or its agent fails (`deletion_paths`).
      limit_seconds: how long the slice may be billed; None: no limit. It comes from the attempt that requests the
        slice, so the machine needs neither the bucket nor the agent to keep it.

    Raises:
      UserError: the running forerun or its Python cannot be installed on another machine.
    """
    python = planned_python(run)
    values = {
        "RUN": run.name,
        "DEVICE": run.device,
        "HOSTS": str(option.hosts),
        "PYTHON": python,
        "WHEEL_SHA256": planned_wheel(run).sha256,
        "LOCK_SHA256": locked_requirements(run.device, python).sha256,
        "UV_REQUIREMENT": uv_requirement(),
        "BUNDLE_SECONDS": str(BUNDLE_SECONDS),
        "SETUP_SECONDS": str(SETUP_SECONDS if limit_seconds is None else min(SETUP_SECONDS, limit_seconds)),
        "LIMIT_SECONDS": "" if limit_seconds is None else str(limit_seconds + LIMIT_MARGIN_SECONDS),
        "DELETION": "\n".join(deletion),
    }
    require_one_line({name: value for name, value in values.items() if name != "DELETION"})
    require_one_line({"DELETION": list(deletion)})
    return _PLACE.sub(lambda found: shlex.quote(values[found[1]]), TEMPLATE.read_text(encoding="utf-8"))


def planned_python(run: CloudRun) -> str:
    """Return the version of Python that planned the job, such as `3.11`."""
    return ".".join((run.versions.get("python") or running_python()).split(".")[:2])


def slice_metadata(run: CloudRun, attempt: AttemptEntry, public_key: str, project: str | None = None) -> dict[str, str]:
    """Return the instance metadata of the machines of an attempt.

    Args:
      public_key: the public ssh key of the run, as `ssh-ed25519 AAAA...`.
      project: the project of the slice; None: the machine asks the metadata server.
    """
    values = {
        STARTUP_SCRIPT: startup_script(run, attempt.option, deletion_paths(attempt, project), attempt.limit_seconds),
        SSH_KEYS: f"{USER}:{' '.join(public_key.split()[:2])} {USER}",
        # The key above must work, and host keys must be readable, whatever the project's defaults are.
        "enable-oslogin": "FALSE",
        "enable-guest-attributes": "TRUE",
        labels.FOLDER: run.folder,
        labels.USD_PER_HOUR: f"{attempt.option.usd_per_hour:.6f}",
    }
    if run.max_usd is not None:
        values[labels.MAX_USD] = f"{run.max_usd:.2f}"
    return values


PROJECT = "PROJECT"  # the startup script replaces it by the project of the metadata server, if it is not known here


def deletion_paths(attempt: AttemptEntry, project: str | None) -> list[str]:
    """Return `API PATH` of each request. Those that do not exist are refused, which does no harm.

    The controller or `forerun down` removes what these requests leave, such as templates. That costs nothing.
    """
    place, name = attempt.option.zone, attempt.resource
    match attempt.option.provider:
        case "tpu":
            parent = f"v2/projects/{project or PROJECT}/locations/{place}"
            return [f"tpu {parent}/queuedResources/{name}?force=true", f"tpu {parent}/nodes/{name}"]
        case "compute":
            parent = f"projects/{project or PROJECT}/zones/{place}"
            return [f"compute {parent}/instanceGroupManagers/{name}", f"compute {parent}/instances/{name}"]
        case _:
            return []  # machines that are not rented


AGENT_UNIT = "forerun-agent.service"
FORERUN = "/opt/forerun/venv/bin/forerun"
STATE_FOLDER = "/var/lib/forerun"
HOST_JOB_FOLDER = f"{STATE_FOLDER}/job"
_TEMPLATES = Path(__file__).parent / "units"


def train_command(run: CloudRun, hosts: int) -> list[str]:
    """Return the command that trains the job on each host.

    Keys of the place and the device come last: they win over the job and over the user's arguments.
    """
    folder = run.folder.rstrip("/").rpartition("/")[0]
    command = [FORERUN, "train", f"{HOST_JOB_FOLDER}/job.yaml", *run.arguments]
    command += [f"name={run.name}", f"device={run.device}", f"checkpoint.folder={folder}"]
    command += [f"runs={HOST_JOB_FOLDER}/runs", "--supervise"]
    if hosts > 1:
        command += ["--host", "auto", "--secret", f"{STATE_FOLDER}/secret"]
    return command


def unit_files(run: CloudRun, hosts: int) -> dict[str, str]:
    """Return the text of each unit file by its name."""
    texts = {name: (_TEMPLATES / name).read_text(encoding="utf-8") for name in (TRAIN_UNIT, AGENT_UNIT)}
    return {name: text.replace("@COMMAND@", unit_words(train_command(run, hosts))) for name, text in texts.items()}


def unit_words(words: Sequence[str]) -> str:
    r"""Return a command line as systemd reads it.

    systemd replaces `%` specifiers and `$` variables also inside of quotes, so both are doubled.

    Raises:
      UserError: a word has a control character. systemd begins a new line after a carriage return, also in quotes.
    """
    require_one_line({"the command of the training": list(words)})
    return " ".join(_unit_word(word) for word in words)


def _unit_word(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    plain = word and all(letter.isalnum() or letter in "/_-.=:,+@%" for letter in word)
    return escaped if plain else f'"{escaped}"'
