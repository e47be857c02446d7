"""`forerun check`: every value of a job, where it came from, and what follows from it."""

from __future__ import annotations

import argparse
import glob
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from forerun.errors import UserError
from forerun.safe_text import clean, printable, raw_stream

if TYPE_CHECKING:
    from forerun.config.load import Loaded
    from forerun.config.schema import Job
    from forerun.data.corpus import Corpus
    from forerun.models.base import Model
    from forerun.program.derive import Derived

_WIDEST_VALUE = 20
_NARROWEST_ORIGIN = 24
READ_BYTES = 64 << 20  # of data that is tokenized just to say how many steps an epoch has
_BOLD, _DIM, _CYAN, _PLAIN = "\033[1m", "\033[2m", "\033[36m", "\033[0m"

# Why a decoder without a name has what the job does not say.
_FREE_DIMENSIONS = {
    "kv_heads": "= heads",
    "head_dim": "= embed / heads",
    "mlp": "8/3 embed, in whole 64s",
    "vocab": "the tokenizer's, in whole 128s",
    "tied": "one matrix less",
    "qkv_bias": "Qwen2 has it",
    "qk_norm": "Qwen3 has it",
    "window": "every position sees all before it",
    "rope_theta": "RoPE's own base",
    "rope_scaling": "no longer context than trained",
    "norm_eps": "usual",
}
_REMAT = {
    "none": "all activations stay in memory",
    "full": "layer inputs stay, the rest is computed again",
    "dots": "results of matrix products stay, the rest is computed again",
    "named": "the named residuals stay, the rest is computed again",
}


class Row(NamedTuple):
    name: str
    value: str
    origin: str
    kind: Literal["default", "file", "override", "derived"] = "derived"


class Group(NamedTuple):
    title: str
    rows: list[Row]


Applied = dict[str, tuple[Any, str]]  # key -> the value that applies where the job says null, and why


@dataclass(frozen=True)
class Place:
    """Where the job would run: the devices here, or those of a slice that is not here."""

    title: str
    reason: str
    devices: int
    platform: str
    kind: str


@dataclass(frozen=True)
class Outcome:
    """What follows from the job in that place."""

    job: Job  # concrete
    place: Place
    derived: Derived
    model: Model
    chunk: int
    kernel: str
    validation: tuple[tuple[str, str], ...] = ()  # what is held out of each part, and which share that is


def run(args: argparse.Namespace) -> int:
    from forerun.cli.job_warnings import print_warnings
    from forerun.config.load import load
    from forerun.models.plugin import use_job_folder

    loaded = load(args.job, args.overrides)
    slice_place = _place_on(args.on, loaded.job) if args.on else None
    use_job_folder(loaded.path.parent)
    applied = _model_values(loaded.job)
    print_warnings(loaded.job)
    try:
        outcome = _outcome(loaded.job, slice_place or _place_here(loaded.job))
    except UserError:
        _show(job_groups(loaded, applied), complete=args.all)
        sys.stdout.flush()
        raise
    applied |= _derived_values(loaded.job, outcome)
    derived = Group(f"derived for {outcome.place.title}", _derived_rows(outcome))
    _show([*job_groups(loaded, applied), derived], complete=args.all)
    return 0


def job_groups(loaded: Loaded, applied: Applied) -> list[Group]:
    """The job's own values, then each section, in the order of the schema."""
    from forerun.config import keys
    from forerun.config.load import values
    from forerun.config.source import flow
    from forerun.models.sizes import is_plugin

    groups: dict[str, list[Row]] = {"job": []}
    for key, value in values(loaded.job).items():
        section, dot, _ = key.partition(".")
        origin = loaded.origins[key]
        shown = "-" if value is None else flow(value)
        where = origin.where
        if origin.kind == "default":
            where = f"default: {keys.reason(key).removeprefix(f'{shown}: ')}"
        if value is None and key in applied:
            value, reason = applied[key]
            shown = "-" if value is None else flow(value)
            where = reason if origin.kind == "default" else f"{where}: null, so {reason}"
        groups.setdefault(section if dot else "job", []).append(Row(key, shown, where, origin.kind))
    if is_plugin(loaded.job.model):
        groups["model"] = _plugin_rows(loaded, groups["model"], applied)
    return [Group(title, rows) for title, rows in groups.items()]


def _plugin_rows(loaded: Loaded, rows: list[Row], applied: Applied) -> list[Row]:
    """A class of the user's own: its options with their defaults, and the decoder's keys as one row."""
    from forerun.config.source import flow

    unused = f"layers, embed and the other keys of the decoder do not apply to {loaded.job.model.name}"
    options = [(key, *found) for key, found in applied.items() if key.startswith("model.options.")]
    return [
        *(row for row in rows if row.value != "-"),
        *(Row(key, flow(value), why, "default") for key, value, why in options if key not in loaded.origins),
        Row("model.*", "-", unused, "default"),
    ]


def without_defaults(groups: list[Group]) -> tuple[list[Group], int]:
    """Return what the user set and what is derived, and the number of rows left out."""
    kept = [Group(title, [row for row in rows if _is_shown(row)]) for title, rows in groups]
    shown = sum(len(group.rows) for group in kept)
    return [group for group in kept if group.rows], sum(len(group.rows) for group in groups) - shown


def _is_shown(row: Row) -> bool:
    return row.kind != "default" or row.origin.startswith("derived:")


def table(groups: list[Group], width: int | None, colour: bool) -> str:
    """Titled groups of aligned rows. A value too wide for its column has the origin on a line of its own."""
    groups = [Group(printable(group.title), [_printable(row) for row in group.rows]) for group in groups]
    rows = [row for group in groups for row in group.rows]
    names = max(len(row.name) for row in rows)
    values = max((len(row.value) for row in rows if len(row.value) <= _WIDEST_VALUE), default=1)
    indent = " " * (2 + names + 2 + values + 2)
    room = max(_NARROWEST_ORIGIN, width - len(indent)) if width else sys.maxsize

    def painted(text: str, code: str) -> str:
        return f"{code}{text}{_PLAIN}" if colour and code else text

    def lines(row: Row) -> list[str]:
        first, *more = textwrap.wrap(row.origin, room, break_long_words=False) if width else [row.origin]
        left, right = {"default": (_DIM, _DIM), "override": ("", _CYAN)}.get(row.kind, ("", _DIM))
        head = f"  {row.name:<{names}}  {row.value:<{values}}  "
        start = [painted(head, left) + painted(first, right)]
        if len(head) > len(indent):
            start = [painted(head.rstrip(), left), indent + painted(first, right)]
        return start + [indent + painted(text, right) for text in more]

    return "\n\n".join(
        "\n".join([painted(group.title, _BOLD), *(line for row in group.rows for line in lines(row))])
        for group in groups
    )


def _printable(row: Row) -> Row:
    return row._replace(name=clean(row.name), value=clean(row.value), origin=clean(row.origin))


def _show(groups: list[Group], complete: bool) -> None:
    hidden = 0
    if not complete:
        groups, hidden = without_defaults(groups)
    terminal = sys.stdout.isatty()
    width = min(120, os.get_terminal_size(sys.stdout.fileno()).columns) if terminal else None
    text = table(groups, width, colour=terminal and not os.environ.get("NO_COLOR"))
    print(text, file=raw_stream(sys.stdout))  # the table filters its cells
    if hidden:
        print(f"\n{hidden} more values have their defaults: --all shows them with their reasons")


def _place_on(name: str, job: Job) -> Place:
    from forerun.hardware.slices import slice_named

    found = slice_named(name)
    return Place(found.name, f"--on {name}", found.used_devices(job.devices), "tpu", f"TPU {found.chip.name}")


def _place_here(job: Job) -> Place:
    from forerun.hardware.devices import choose

    chosen = choose(job.device, job.devices)
    if chosen.warning:
        print(f"warning: {chosen.warning}", file=sys.stderr)
    first = chosen.devices[0]
    return Place("this machine", chosen.reason, len(chosen.devices), chosen.platform, first.device_kind)


def _outcome(job: Job, place: Place) -> Outcome:
    """The way of `train`, up to the point where something would be compiled."""
    from forerun.hardware.mesh import check_model, resolve
    from forerun.loop.concrete import concrete
    from forerun.models.registry import model_of
    from forerun.program import kernels
    from forerun.program.build import loss_chunk
    from forerun.program.derive import derive

    mesh = resolve(job.mesh.data, job.mesh.fsdp, job.mesh.tp, place.devices, place.title)
    corpus = _corpus(job)
    for text in () if corpus is None else corpus.warnings:
        print(f"warning: {text}", file=sys.stderr)
    known = concrete(job, corpus)
    model = model_of(known.model)
    check_model(mesh, model.heads, job.batch, job.micro_batch)
    derived = derive(job, mesh, None if corpus is None else corpus.rows.epoch)
    kernel = kernels.attention(job.attention, place.platform, place.kind, job.precision.compute)
    parts = () if corpus is None else corpus.parts
    held = tuple((one.number, one.asked) for part in parts if (one := part.held_out) is not None)
    return Outcome(known, place, derived, model, loss_chunk(job, model, derived), kernel.name, held)


def _corpus(job: Job) -> Corpus | None:
    """The data, if the steps follow from it or if it is small; else its files are only looked for.

    A place that cannot be seen from here (a bucket, another machine's disk) is then a warning.
    """
    from forerun.data.source.sources import open_source
    from forerun.loop.corpus import open_corpus

    if job.steps is None:
        return open_corpus(job)
    size_bytes = 0
    for part in job.data.parts.values():
        if "://" in part.path or not (glob.has_magic(part.path) or Path(part.path).exists()):
            print(f"warning: data.path {part.path} is not on this machine", file=sys.stderr)
            return None
        size_bytes += open_source(part).size_bytes
    return open_corpus(job) if size_bytes <= READ_BYTES else None


def _model_values(job: Job) -> Applied:
    """The decoder's dimensions that the job leaves open. A class of the user's own has none of them."""
    from dataclasses import fields

    from forerun.config.schema import RopeScaling
    from forerun.models.pretrained import config_of
    from forerun.models.sizes import is_plugin

    if is_plugin(job.model):
        return {}
    config = config_of(job.model, tokenizer_vocab=_tokenizer_vocab(job))
    found: Applied = {}
    for field in fields(config):
        value = getattr(config, field.name)
        reason = f"from {job.model.name}" if job.model.name else f"default: {_FREE_DIMENSIONS.get(field.name, '')}"
        shown = value if isinstance(value, bool | int | float | str | None) else str(value)
        found[f"model.{field.name}"] = (value.model_dump() if isinstance(value, RopeScaling) else shown, reason)
    return found


def _tokenizer_vocab(job: Job) -> int | None:
    from forerun.loop.corpus import tokenizer_of

    return tokenizer_of(job).vocab if job.model.name is None and job.model.vocab is None else None


def _derived_values(job: Job, outcome: Outcome) -> Applied:
    from dataclasses import fields, is_dataclass

    from forerun.config import keys
    from forerun.models.sizes import is_plugin

    derived = outcome.derived
    found: Applied = {
        "devices": (outcome.place.devices, f"default: all of {outcome.place.title}"),
        "micro_batch": (derived.micro_batch, f"derived: {derived.reasons['micro_batch']}"),
        "loss_chunk": (outcome.chunk, f"derived: {keys.reason('loss_chunk')}"),
    }
    if job.steps is None:
        found["steps"] = (derived.steps, f"derived: {derived.reasons['steps']}")
        found["epochs"] = (1, "default: neither steps nor epochs is given")
    if is_plugin(job.model):
        name = type(outcome.model).__name__
        found["model.vocab"] = (outcome.model.vocab, "derived: the tokenizer's")
        if is_dataclass(outcome.model):
            found |= {
                f"model.options.{field.name}": (getattr(outcome.model, field.name), f"default: of {name}")
                for field in fields(outcome.model)
                if field.name != "vocab"
            }
    return found


def _derived_rows(outcome: Outcome) -> list[Row]:
    from forerun.loop.starting_weights import starting_weights
    from forerun.models.pretrained import is_checkpoint
    from forerun.units import Bytes, Count

    job, place = outcome.job, outcome.place
    parameters, trained = _parameters(outcome.model)
    frozen = "" if trained == parameters else f"; {Count(trained)} of them are trained"
    rows = [
        Row("devices", f"{place.devices} x {place.kind}", place.reason),
        Row("parameters", str(Count(parameters)), _dimensions(outcome) + frozen),
        Row("weights", "pretrained" if is_checkpoint(job.model) else "random", starting_weights(job)),
    ]
    rows += [Row(*row) for row in outcome.derived.rows()]
    rows += [Row("validation", count, share) for count, share in outcome.validation]
    if outcome.model.heads is not None:
        why = f"auto: for {place.kind}" if job.attention == "auto" else "the job's"
        rows.append(Row("attention kernel", outcome.kernel, why))
    rows.append(Row("remat", job.remat.policy, _REMAT[job.remat.policy]))
    logits = Bytes(4 * outcome.derived.micro_batch * outcome.chunk * outcome.model.vocab)
    pieces = f"{outcome.chunk} of {job.sequence} positions at a time: {logits} of logits on a device at most"
    rows.append(Row("loss chunk", str(outcome.chunk), pieces))
    return rows


def _parameters(model: Model) -> tuple[int, int]:
    """(all, those that are trained)"""
    import jax

    from forerun.nn.spec import is_spec

    specs = jax.tree.leaves(model.specs(), is_leaf=is_spec)
    return sum(spec.size for spec in specs), sum(spec.size for spec in specs if spec.trainable)


def _dimensions(outcome: Outcome) -> str:
    from forerun.models.decoder import Decoder

    if not isinstance(outcome.model, Decoder):
        return f"counted over the specs of {outcome.job.model.name}"
    config = outcome.model.config
    shared = "" if config.kv_heads == config.heads else f" on {config.kv_heads} key/value heads"
    return (
        f"{config.layers} layers of width {config.embed}, {config.heads} heads of {config.head_dim}{shared}, "
        f"mlp {config.mlp}, vocabulary {config.vocab}"
    )
