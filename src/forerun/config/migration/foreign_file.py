"""Configuration files of axolotl, TRL and the transformers Trainer, converted to a job."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forerun.config import keys
from forerun.config.migration.conversion import ForeignValues, nested
from forerun.config.migration.registry import convert_value, foreign_key, leaves, surroundings
from forerun.config.migration.values import DEVICE_KEYS, device_count
from forerun.config.schema import Job
from forerun.config.source import MAX_JOB_BYTES, flow, read_file
from forerun.errors import UserError
from forerun.files import read_regular
from forerun.safe_text import clean

PLACEHOLDERS = {"model.name": "owner/model", "data.path": "path/of/data"}
# Defaults that change the result, and differ from those of forerun.
_ADAMW = {"optimizer.warmup": 0, "optimizer.weight_decay": 0.0, "optimizer.b2": 0.999}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "axolotl": {**_ADAMW, "optimizer.warmup": 0.03, "epochs": 1, "batch": 1},
    "transformers": {**_ADAMW, "optimizer.lr": 5e-5, "optimizer.schedule": "linear", "epochs": 3, "batch": 8},
    "TRL": {**_ADAMW, "optimizer.lr": 2e-5, "optimizer.schedule": "linear", "epochs": 3, "batch": 8},
    "TRL (DPO)": {**_ADAMW, "optimizer.lr": 1e-6, "optimizer.schedule": "linear", "epochs": 3, "batch": 8,
                  "preferences.loss": "dpo"},
}  # fmt: skip
_AXOLOTL_NAMES = {"base_model", "micro_batch_size", "sequence_len", "val_set_size", "num_epochs", "adapter"}
_TRL_NAMES = {"max_length", "max_seq_length", "packing", "dataset_text_field", "assistant_only_loss", "dataset_name",
              "model_name_or_path", "use_peft"}  # fmt: skip
_DPO_NAMES = {"precompute_ref_log_probs", "max_prompt_length", "reference_free", "label_smoothing"}
WIDTH = 118
_SHORT = {"model": "name", "remat": "policy", "preferences": "loss", "distil": "teacher"}


@dataclass
class ConvertedJob:
    """A job that was made from a configuration of another trainer.

    Attributes:
      source: the trainer: axolotl, transformers, TRL or TRL (DPO).
      text: the job file, with comments.
      job: the same job, checked.
      not_converted: the keys that the job does not contain, each with the reason.
      unneeded: the keys that forerun does not need, each with the reason.
      assumed: what was assumed because the file does not say it.
    """

    source: str
    text: str = ""
    job: Job | None = None
    not_converted: dict[str, str] = field(default_factory=dict)
    unneeded: dict[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)


@dataclass
class _Draft:
    """The settings of the new job, with the origin of each value and a note."""

    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: Any, origin: str, note: str = "") -> bool:
        """Set a key, and return False if it has another value already."""
        if key in self.settings:
            is_same = bool(self.settings[key] == value)
            self.origins[key] += f", {origin}" if is_same else ""
            return is_same
        self.settings[key], self.origins[key], self.notes[key] = value, origin, note
        return True

    def comments(self) -> dict[str, str]:
        """Return the comment of each key: the keys that it comes from, and a note."""
        return {key: f"{origin}: {self.notes[key]}" if self.notes[key] else origin
                for key, origin in self.origins.items()}  # fmt: skip


def convert_file(
    path: Path, *, devices: int | None = None, model: str | None = None, data: str | None = None
) -> ConvertedJob:
    """Return the job that a configuration file of another trainer describes.

    Args:
      path: a YAML file of axolotl or TRL, or the arguments of a transformers Trainer as JSON.
      devices: the number of devices, on which the batch depends; default: that of the file, else 1.
      model: the model, if the file does not name it.
      data: the data, if the file does not name it.

    Raises:
      UserError: The file cannot be read, is not such a configuration, or trains in a way that forerun does not have.
    """
    tree = _read(path)
    given = surroundings(tree, devices)
    found, draft = ConvertedJob(_source(path, tree, given)), _Draft()
    for key, value in (("model.name", model), ("data.path", data)):
        if value is not None:
            draft.set(key, value, "from the command line")
    for name, value in leaves(tree):
        _add(name, value, given, found, draft, path)
    _add_defaults(given, found, draft)
    _remove_rejected(found, draft, path)
    found.job = Job.model_validate(nested(draft.settings))
    found.text = _job_text(path.name, found, draft.settings, draft.comments())
    return found


def _read(path: Path) -> dict[str, Any]:
    if path.suffix.lower() != ".json":
        return dict(read_file(path).tree)
    try:
        tree = json.loads(read_regular(path, MAX_JOB_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(
            "E-COMMAND-080",
            f"{path} is not a readable JSON file",
            why=clean(str(error))[:200],
            fix="write it with: open('training_args.json', 'w').write(args.to_json_string())",
        ) from None
    return tree if isinstance(tree, dict) else {}


def _source(path: Path, tree: Mapping[str, Any], given: ForeignValues) -> str:
    """Return the trainer of a configuration. Raise UserError if too few keys are known."""
    values, known = set(given.values), [name for name, _ in leaves(tree) if foreign_key(name)]
    is_job = {"model", "data"} <= set(tree) and set(tree) <= set(keys.siblings(""))
    if len(known) < 2 or is_job:
        raise UserError(
            "E-COMMAND-081",
            f"{path} is not a configuration that forerun can convert",
            why="it is a job of forerun" if is_job else f"{len(known)} of its {len(values)} keys are known",
            fix=f"forerun check {path}" if is_job
            else "give the YAML file of axolotl or TRL, or TrainingArguments as JSON",
        )  # fmt: skip
    if values & _AXOLOTL_NAMES:
        return "axolotl"
    if values & _DPO_NAMES or ("beta" in values and "loss_type" in values):
        return "TRL (DPO)"
    return "TRL" if values & _TRL_NAMES else "transformers"


def _add(name: str, value: Any, given: ForeignValues, found: ConvertedJob, draft: _Draft, path: Path) -> None:
    """Convert one key of the file into settings, or record why this is not possible."""
    shown = clean(name).replace("\n", " ")[:80]
    conversion = convert_value(name, value, given)
    if conversion is None:
        if value in (None, "", [], {}):
            found.unneeded[shown] = "it is not set"
        else:
            found.not_converted[shown] = "forerun does not know this key"
    elif conversion.outcome == "impossible":
        raise UserError(
            "E-COMMAND-082",
            f"{path} cannot become a job",
            why=f"{shown}: {conversion.note}",
            fix="train this with its own program, or remove the key to train the rest",
        )
    elif conversion.outcome == "unneeded":
        found.unneeded[shown] = conversion.note
    elif conversion.outcome == "unsupported":
        found.not_converted[shown] = conversion.note
    else:
        note = conversion.note
        for key, one in conversion.settings.items():
            if not draft.set(key, one, shown, note):
                found.not_converted[shown] = f"{key} is set already, by {draft.origins[key]}"
            note = ""  # once is enough
        if conversion.lost:
            found.not_converted[shown] = conversion.lost


def _add_defaults(given: ForeignValues, found: ConvertedJob, draft: _Draft) -> None:
    """Add defaults of the other trainer that differ from those of forerun, and what the file does not say."""
    devices, comment = device_count(given), f"default of {found.source}"
    for key, value in _DEFAULTS[found.source].items():
        if key in draft.settings or (key == "epochs" and "steps" in draft.settings):
            continue
        draft.set(key, value * (devices or 1) if key == "batch" else value, comment)
    falls = draft.settings.get("optimizer.schedule", "cosine") in ("cosine", "linear")
    if falls and "optimizer.final_lr" not in draft.settings:
        draft.set("optimizer.final_lr", 0.0, f"schedules of {found.source} end at 0")
    if devices is None:
        found.assumed.append("1 device, because the file does not say how many; --devices N multiplies the batch")
    elif given.devices is None:
        found.assumed.append(f"{devices} devices, from {next(n for n in DEVICE_KEYS.split() if n in given.values)}")
    has_data = any(key.startswith(("data.path", "data.mixture")) for key in draft.settings)
    for key, option in (("model.name", "model"), ("data.path", "data")):
        if key not in draft.settings and not (option == "data" and has_data):
            draft.set(key, PLACEHOLDERS[key], "CHANGE THIS", f"the file does not name it; --{option} sets it")
            found.assumed.append(f"{option}: {PLACEHOLDERS[key]} is a placeholder; edit it, or use --{option}")


def _remove_rejected(found: ConvertedJob, draft: _Draft, path: Path) -> None:
    """Remove settings that the schema rejects together, for example because of another setting, and record them."""
    for _ in range(len(draft.settings)):
        try:
            Job.model_validate(nested(draft.settings))
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)[0]
            message = clean(str(details["msg"])).removeprefix("Value error, ")
            place = ".".join(map(str, details["loc"]))
            named = [key for key in draft.settings if key == place] or [key for key in draft.settings if key in message]
            if not named:
                raise UserError(
                    "E-COMMAND-083",
                    f"{path} has values that do not fit together in a job",
                    why=message,
                    fix="change or remove these keys, and convert it again",
                ) from None
            del draft.settings[named[0]]
            found.not_converted[draft.origins.pop(named[0])] = message
        else:
            return


# ---- The text of the job: its keys in the order of the schema, with the origin of each value as a comment ----


def _job_text(name: str, found: ConvertedJob, settings: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return a job file.

    Args:
      name: the name of the file that was converted.
      found: what could not be converted, and what is not needed.
      settings: the dotted keys of the job and their values.
      comments: the origin of each value.
    """
    order = list(keys.fields())
    ordered = sorted(settings, key=lambda key: _position(key, order))
    lines = [f"# Converted from {clean(name)} ({found.source}). A comment names the key that a value comes from."]
    for assumed in found.assumed:
        lines += _wrapped(f"Assumed: {assumed}", "# ")
    lines += _tree(nested({key: settings[key] for key in ordered}), comments, "", "")
    for title, listed in (("Not converted", found.not_converted), ("Not needed", _grouped(found.unneeded))):
        if listed:
            lines += ["", f"# {title}:"]
            for key, reason in listed.items():
                lines += _wrapped(f"{key}: {reason}", "#   ")
    return "\n".join(lines) + "\n"


def _position(key: str, order: list[str]) -> tuple[int, str]:
    """Return the place of a key in the schema. The names of columns and of sources are not in the schema."""
    parts = key.split(".")
    found = next(".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in order)
    return order.index(found), key


def _tree(tree: Mapping[str, Any], comments: Mapping[str, str], prefix: str, indent: str) -> Iterator[str]:
    """Yield the lines of nested sections."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and list(value) == [_SHORT.get(key)]:
            key, value = f"{key}.{_SHORT[key]}", value[_SHORT[key]]
        if isinstance(value, dict) and value and key not in comments:
            yield f"{indent}{name}:"
            yield from _tree(value, comments, f"{key}.", f"{indent}  ")
        else:
            comment = f"  # {clean(comments[key])}".replace("\n", " ") if key in comments else ""
            yield f"{indent}{flow(name)}: {flow(value)}{comment}"


def _grouped(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons with all keys that have the same one."""
    names: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        names.setdefault(reason, []).append(key)
    return {", ".join(listed): reason for reason, listed in names.items()}


def _wrapped(text: str, prefix: str) -> list[str]:
    line = clean(text).replace("\n", " ")
    return textwrap.wrap(line, WIDTH, initial_indent=prefix, subsequent_indent=f"{prefix}  ", break_long_words=False)
