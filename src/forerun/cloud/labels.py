"""Names, labels and metadata of the resources of a run. They identify a run without any local file."""

from __future__ import annotations

import re
import uuid

from forerun.errors import UserError

RUN, ATTEMPT, ROLE, CAPACITY = "forerun-run", "forerun-attempt", "forerun-role", "forerun-capacity"
SLICE_ROLE, KEEPER_ROLE = "slice", "keeper"
# Metadata of the machines. Everyone who may list the project's resources can read it: it never contains a secret.
FOLDER, USD_PER_HOUR, MAX_USD = "forerun-folder", "forerun-usd-per-hour", "forerun-max-usd"
PREFIX = "forerun"
MOST_CHARACTERS = 40  # of a run's name; the complete name of a resource has at most 63


def run_label(name: str) -> str:
    """Return a run's name as clouds accept it in names and labels: `Llama 3_lora` becomes `llama-3-lora`."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not plain or len(plain) > MOST_CHARACTERS:
        raise UserError(
            "E-CLOUD-001",
            f"the run {name!r} cannot name resources in a cloud",
            why=f"a name needs a letter or digit and at most {MOST_CHARACTERS} characters; this one becomes {plain!r}",
            fix="set another name in the job: name=my-run",
        )
    return plain


def resource_name(run: str, attempt: int) -> str:
    """Return the name of the slice of an attempt, such as `forerun-quickstart-1`.

    It is a function of the run and the attempt. Two controllers that create the same attempt therefore cannot create
    two slices in one zone.
    """
    return f"{PREFIX}-{run_label(run)}-{attempt}"


def slice_labels(run: str, attempt: int) -> dict[str, str]:
    return {RUN: run_label(run), ATTEMPT: str(attempt), ROLE: SLICE_ROLE}


def request_id(folder: str, attempt: int, kind: str) -> str:
    """Return the UUID of a request: the same one for each repetition, also by another controller."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{folder}#{attempt}#{kind}"))
