"""The systemd units of a rented machine: the training and the agent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forerun.cloud.one_line import require_one_line
from forerun.cloud.record.entries import CloudRun

TRAIN_UNIT, AGENT_UNIT = "forerun-train.service", "forerun-agent.service"
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
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    plain = word and all(letter.isalnum() or letter in "/_-.=:,+@%" for letter in word)
    return escaped if plain else f'"{escaped}"'
