"""The report of `forerun check`: every value of a job, its origin, and the values derived from it."""

from __future__ import annotations

import glob
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from forerun.reporter import Reporter

if TYPE_CHECKING:
    from forerun.config.load import LoadedJob
    from forerun.config.schema import Job
    from forerun.data.corpus import Corpus
    from forerun.models.decoder_config import DecoderConfig
    from forerun.models.layer_kinds import LayerShape
    from forerun.program.compiler_options import CompilerOptions
    from forerun.resolve.derive import Derived
    from forerun.resolve.resolved_job import ResolvedJob
    from forerun.verbs.check.job_figures import JobFigures, OptimizerFigures, TargetFigures

READ_BYTES = 64 << 20  # data up to this size is tokenized just to report the steps of an epoch

# The reasons for the dimensions that a job without a model name leaves open.
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
    """A value of a job, or one derived from it, with its origin."""

    name: str
    value: str
    origin: str
    kind: Literal["default", "file", "override", "derived"] = "derived"


class Group(NamedTuple):
    """A section of a job with its values."""

    title: str
    rows: list[Row]


Applied = dict[str, tuple[Any, str]]  # key -> the value that applies if the job has null, and the reason


@dataclass(frozen=True)
class Place:
    """Where the job would run: the devices of this machine, or those of a slice."""

    title: str
    reason: str
    devices: int
    platform: str
    kind: str  # the name of the devices for the user
    jax_kind: str  # the name that jax uses, which selects the kernel
    slices: int = 1


@dataclass(frozen=True)
class Outcome:
    """The values that follow from the job on these devices."""

    resolved: ResolvedJob
    place: Place
    derived: Derived
    chunk: int
    kernel: str
    obstacle: str | None  # why it is not the platform's own kernel
    options: CompilerOptions
    figures_key: str | None
    known_figures: JobFigures | None  # None: `derived_rows` computes them
    validation: tuple[tuple[str, str], ...] = ()  # for each part, the number of held-out documents and their share
    forms: tuple[tuple[str, str], ...] = ()  # for each part that is not plain text, its form and how it is read


def job_groups(loaded: LoadedJob, applied: Applied) -> list[Group]:
    """Return the top-level values of the job, then each section, in the order of the schema."""
    from forerun.config import keys
    from forerun.config.load import values
    from forerun.config.optimizer import changed_defaults
    from forerun.config.source import flow
    from forerun.models.sizes import is_plugin

    groups: dict[str, list[Row]] = {"job": []}
    optimizer = loaded.job.optimizer
    own_reasons = {
        f"optimizer.{key}": reason for key, (_, reason) in changed_defaults(optimizer.name, optimizer.schedule).items()
    }
    for key, value in values(loaded.job).items():
        section, dot, _ = key.partition(".")
        origin = loaded.origins[key]
        shown = "-" if value is None else flow(value)
        where = origin.where
        if origin.kind == "default":
            reason = own_reasons.get(key) or keys.reason(key)
            where = f"default: {reason.removeprefix(f'{shown}: ')}"
        if value is None and key in applied:
            value, reason = applied[key]
            shown = "-" if value is None else flow(value)
            where = reason if origin.kind == "default" else f"{where}: null, so {reason}"
        groups.setdefault(section if dot else "job", []).append(Row(key, shown, where, origin.kind))
    if is_plugin(loaded.job.model):
        groups["model"] = _plugin_rows(loaded, groups["model"], applied)
    return [Group(title, rows) for title, rows in groups.items()]


def _plugin_rows(loaded: LoadedJob, rows: list[Row], applied: Applied) -> list[Row]:
    """Return the rows of a custom model class: its options with their defaults. The keys of the decoder are one row."""
    from forerun.config.source import flow

    unused = f"layers, embed and the other keys of the decoder do not apply to {loaded.job.model.name}"
    options = [(key, *found) for key, found in applied.items() if key.startswith("model.options.")]
    return [
        *(row for row in rows if row.value != "-"),
        *(Row(key, flow(value), why, "default") for key, value, why in options if key not in loaded.origins),
        Row("model.*", "-", unused, "default"),
    ]


def place_on(name: str, job: Job) -> Place:
    """Return the devices of a slice."""
    from forerun.hardware.chips import device_kind_of
    from forerun.hardware.slices import slice_named

    found = slice_named(name)
    kind, devices = f"{found.platform.upper()} {found.chip.name}", found.used_devices(job.devices)
    return Place(
        found.name, f"--on {name}", devices, found.platform, kind, device_kind_of(found.chip) or kind, found.slices
    )


THIS_MACHINE = "this machine"


def place_here(job: Job, reporter: Reporter) -> Place:
    """Return the devices of this machine that the job would use."""
    from forerun.hardware.devices import CpuWithoutJax, choose
    from forerun.hardware.slices import slice_count

    chosen = choose(job.device, job.devices, CpuWithoutJax())
    if chosen.warning:
        reporter.warn(chosen.warning)
    first = chosen.devices[0]
    kind = first.device_kind
    return Place(
        THIS_MACHINE, chosen.reason, len(chosen.devices), chosen.platform, kind, kind, slice_count(chosen.devices)
    )


def _prepare_jax(place: Place) -> None:
    """Restrict jax to the CPU, if the place is this machine's CPU: jax must not open or report other platforms."""
    from forerun.hardware.devices import ThisMachine

    if place.title == THIS_MACHINE and place.platform == "cpu":
        ThisMachine().devices("cpu")


def outcome_of(resolved: ResolvedJob, place: Place, reporter: Reporter) -> Outcome:
    """Do what `train` does before it compiles, and return the values that follow from the job."""
    from forerun.hardware import mesh
    from forerun.program.compiler_options import compiler_options
    from forerun.verbs.check import job_figures

    job, axes = resolved.job, resolved.job.mesh
    slices = mesh.slices_of(axes.slices, place.slices, place.platform, job.devices, place.title, axes.min_slices)
    sizes, where = (axes.data, axes.fsdp, axes.tp), (place.devices, place.title, slices)
    shape = mesh.resolve(*sizes, *where, context=axes.context, expert=axes.expert)
    corpus = _corpus(resolved, reporter)
    if corpus is not None:
        for text in corpus.warnings:
            reporter.warn(text)
        resolved = resolved.with_data(corpus)
    name = job_figures.key(resolved, place.platform, place.jax_kind, shape)
    known = job_figures.load_figures(name)
    if known is None:
        _prepare_jax(place)
        resolved.require_mesh(shape)
    derived = resolved.derived(shape, None if corpus is None else corpus.rows.epoch)
    if known is None:
        from forerun.program.build import loss_chunk
        from forerun.program.kernels import job_attention

        choice = job_attention(resolved, resolved.model, place.platform, place.jax_kind)
        chunk, obstacle = loss_chunk(resolved, derived, place.jax_kind), choice.obstacle
        kernel: str = choice.kernel.name
    else:
        chunk, kernel, obstacle = known.chunk, known.kernel, known.obstacle
    options = compiler_options(place.platform, place.jax_kind, shape, job.compiler_options)
    parts = () if corpus is None else corpus.parts
    held = tuple((one.number, one.asked) for part in parts if (one := part.held_out) is not None)
    forms = tuple((part.source.form, ", ".join(part.read_as)) for part in parts if part.source.form != "text")
    return Outcome(resolved, place, derived, chunk, kernel, obstacle, options, name, known, held, forms)


def _corpus(resolved: ResolvedJob, reporter: Reporter) -> Corpus | None:
    """Open the data if the number of steps depends on it or if it is small. Otherwise check only that its files exist.

    Data that this machine cannot see (a bucket, the disk of another machine) is then a warning.
    """
    from forerun.data.source.sources import open_source
    from forerun.resolve.job_corpus import open_corpus
    from forerun.storage.address import Address

    job, size_bytes = resolved.job, 0
    if job.steps is None:
        return open_corpus(resolved)
    for part in job.data.parts.values():
        if Address.of(part.path).is_remote or not (glob.has_magic(part.path) or Path(part.path).exists()):
            reporter.warn(f"data.path {part.path} is not on this machine")
            return None
        size_bytes += open_source(part).size_bytes
    return open_corpus(resolved) if size_bytes <= READ_BYTES else None


def model_values(resolved: ResolvedJob) -> Applied:
    """Return the dimensions of the decoder that the job leaves open. A custom model class has none of them."""
    from dataclasses import fields

    from forerun.config.schema import RopeScaling

    job, config = resolved.job, resolved.config
    if config is None:
        return {}
    found: Applied = {}
    for field in fields(config):
        value = getattr(config, field.name)
        reason = f"from {job.model.name}" if job.model.name else f"default: {_FREE_DIMENSIONS.get(field.name, '')}"
        shown = value if isinstance(value, bool | int | float | str | None) else str(value)
        found[f"model.{field.name}"] = (value.model_dump() if isinstance(value, RopeScaling) else shown, reason)
    return found


def derived_values(job: Job, outcome: Outcome) -> Applied:
    """Return the values that the written job leaves open and that follow from it on the devices."""
    from dataclasses import fields, is_dataclass

    from forerun.config import keys
    from forerun.resolve.resolve_model import derived_base

    derived, resolved = outcome.derived, outcome.resolved
    found: Applied = {
        "devices": (outcome.place.devices, f"default: all of {outcome.place.title}"),
        "micro_batch": (derived.micro_batch, f"derived: {derived.reasons['micro_batch']}"),
        "loss_chunk": (outcome.chunk, f"derived: {keys.reason('loss_chunk')}"),
    }
    if job.steps is None:
        found["steps"] = (derived.steps, f"derived: {derived.reasons['steps']}")
        found["epochs"] = (1, "default: neither steps nor epochs is given")
    if (base := derived_base(job.method.adapter, resolved.model_facts)) is not None:
        found["lora.base"] = (base.dtype, f"derived: {base.reason}")
    if resolved.model_facts.is_plugin:
        model, name = resolved.model, type(resolved.model).__name__
        found["model.vocab"] = (model.vocab, "derived: the tokenizer's")
        if is_dataclass(model):
            found |= {
                f"model.options.{field.name}": (getattr(model, field.name), f"default: of {name}")
                for field in fields(model)
                if field.name != "vocab"
            }
    return found


def derived_rows(outcome: Outcome) -> list[Row]:
    """Return the rows of the values that follow from the job on its devices."""
    from forerun.data.reads.cache_size import bucket_cache
    from forerun.methods.job_notes import description
    from forerun.units import Bytes, Count

    resolved, place, figures = outcome.resolved, outcome.place, _figures(outcome)
    job, method = resolved.job, description(resolved)
    is_pretrained = resolved.model_facts.checkpoint is not None
    rows = [
        Row("devices", f"{place.devices} x {place.kind}", place.reason),
        Row("parameters", str(Count(figures.parameters)), model_dimensions(resolved)),
        Row(
            "method",
            ", ".join(method) or "none",
            "; ".join(method.values()) or "trains the weights of the model itself",
        ),
        Row("trainable", str(Count(figures.trainable_parameters)), _trainable_share(figures)),
        *(Row(f"target {one.name}", one.layers, one.sizes) for one in figures.targets),
        Row("optimizer", job.optimizer.name, _optimizer_state(job, figures.optimizer)),
        Row("weights", "pretrained" if is_pretrained else "random", resolved.starting_weights),
    ]
    family = resolved.model_facts.family
    if family is not None and (wrapper := family.wrapper) is not None:
        kept = f"only this part is trained; an export keeps {', '.join(wrapper.parts)} unchanged"
        rows.append(Row("part", f"text of {wrapper.model_type}", kept))
    rows += [Row(*row) for row in outcome.derived.rows()]
    rows += [Row("rows of data", form, how) for form, how in outcome.forms]
    rows += [Row("validation", count, share) for count, share in outcome.validation]
    if (cache := bucket_cache(job.data)) is not None:
        rows.append(Row("local cache", str(Bytes(cache.limit_bytes)), cache.reason))
    if figures.heads is not None:
        why = f"auto: {outcome.obstacle or f'for {place.kind}'}" if job.attention == "auto" else "the job's"
        rows.append(Row("attention kernel", outcome.kernel, why))
    rows += [Row("compiler", ", ".join(options), why) for why, options in outcome.options.by_reason().items()]
    rows.append(Row("remat", job.remat.policy, _REMAT[job.remat.policy]))
    logits = Bytes(4 * outcome.derived.micro_batch * outcome.chunk * figures.vocab)
    pieces = f"{outcome.chunk} of {job.sequence} positions at a time: {logits} of logits on a device at most"
    rows.append(Row("loss chunk", str(outcome.chunk), pieces))
    return rows


def _figures(outcome: Outcome) -> JobFigures:
    """Return the figures of the job: the stored ones, or new ones, which are then stored."""
    if outcome.known_figures is not None:
        return outcome.known_figures
    from forerun.methods.method import parameter_count, trainable_count
    from forerun.verbs.check.job_figures import JobFigures, store_figures

    resolved = outcome.resolved
    figures = JobFigures(
        parameters=parameter_count(resolved),
        trainable_parameters=trainable_count(resolved),
        heads=resolved.model.heads,
        vocab=resolved.model.vocab,
        chunk=outcome.chunk,
        kernel=outcome.kernel,
        obstacle=outcome.obstacle,
        targets=_targets(resolved),
        optimizer=_optimizer_figures(resolved),
    )
    store_figures(outcome.figures_key, figures)
    return figures


def _optimizer_figures(resolved: ResolvedJob) -> OptimizerFigures:
    from forerun.methods.method import run_specs
    from forerun.methods.optimizer_parameters import group_numbers
    from forerun.program.state import resting
    from forerun.verbs.check.job_figures import OptimizerFigures

    sizes, groups = resting(resolved), resolved.job.optimizer.groups
    if groups:
        group_numbers(run_specs(resolved), groups, resolved.model_facts.module_names)  # raises if a name is wrong
    return OptimizerFigures(sizes.optimizer_bytes, sizes.learned, sizes.linear)


def _optimizer_state(job: Job, figures: OptimizerFigures) -> str:
    from forerun.config.optimizer import MUON
    from forerun.units import Bytes, Count

    each = figures.state_bytes / max(1, figures.learned)
    text = f"{Bytes(figures.state_bytes)} of state, {each:.3g} bytes per trained parameter"
    if job.optimizer.name == MUON:
        text += f"; Muon trains {Count(figures.linear)} parameters, AdamW {Count(figures.learned - figures.linear)}"
    return text


def _trainable_share(figures: JobFigures) -> str:
    from forerun.units import Count

    more = figures.trainable_parameters - figures.parameters
    if more == 0:
        return "all parameters"
    if more > 0:
        return f"all parameters, and {Count(more)} that the method adds"
    return f"{100 * figures.trainable_parameters / figures.parameters:.3g} % of the number of parameters"


def _targets(resolved: ResolvedJob) -> tuple[TargetFigures, ...]:
    """Return for each module with adapters in how many layers it has one, and the parameters."""
    from forerun.methods.target_matches import job_coverage
    from forerun.units import Count
    from forerun.verbs.check.job_figures import TargetFigures

    coverage = job_coverage(resolved)
    if coverage is None:
        return ()
    found = []
    for match in coverage.matches:
        layers = f"{match.layers} of {coverage.layers} layers" if match.layers else "-"
        sizes = f"adapters have {Count(match.trainable)} parameters, their matrices {Count(match.matrices)}"
        found.append(TargetFigures(match.name, layers, f"{sizes} ({100 * match.share:.3g} %)"))
    return tuple(found)


def model_dimensions(resolved: ResolvedJob) -> str:
    """Return layers, width and vocabulary of a job's model as text."""
    from forerun.models.decoder_config import DecoderConfig

    config = resolved.config
    if not isinstance(config, DecoderConfig):
        return f"counted over the specs of {resolved.job.model.name}"
    shapes = Counter(kind.shape for kind in config.all_kinds)
    if None in shapes:
        return f"{config.layers} layers of width {config.embed}, {_layer(config, None)}, vocabulary {config.vocab}"
    each = ", ".join(f"{count} {shape.name} ({_layer(config, shape)})" for shape, count in shapes.items() if shape)
    return f"{config.layers} layers of width {config.embed}: {each}; vocabulary {config.vocab}"


def _layer(config: DecoderConfig, shape: LayerShape | None) -> str:
    """Return the dimensions of one layer as text."""
    mlp = f"mlp {config.size('F', shape)}"
    if (e := config.experts) is not None:
        beside = f", and a shared one with {mlp}" if config.has_mlp else ""
        mlp = f"{e.count} experts with mlp {e.mlp}, {e.top} per token{beside}"
    if shape is not None and shape.mixer != "attention":
        return mlp
    heads, kv_heads = config.size("H", shape), config.size("K", shape)
    own = shape is None or not shape.shares_keys
    shared = "" if kv_heads == heads and own else f" on {kv_heads} key/value heads" if own else " on shared keys"
    return f"{heads} heads of {config.size('D', shape)}{shared}, {mlp}"
