"""`forerun export`: write a run as a Hugging Face folder, then read it back and compare it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from forerun.checkpoint.reader import chosen_step
from forerun.config.load import dump
from forerun.config.schema import Job
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer, tokenizer_path
from forerun.errors import UserError
from forerun.files import atomic_write, read_regular
from forerun.hardware.prices import cheapest
from forerun.hub.names import is_folder
from forerun.hub.safetensors import Weights
from forerun.hub.snapshot import Snapshot, snapshot
from forerun.methods.method import run_specs
from forerun.methods.qat import kept_rounding
from forerun.models.base import Model
from forerun.models.families.base import Family
from forerun.models.families.registry import family_for
from forerun.models.keys import leaves_of
from forerun.models.model_facts import model_for, read_snapshot
from forerun.models.quantization_config import QUANTIZATION
from forerun.nn.compute import Compute
from forerun.nn.weights import lowrank
from forerun.reporter import SILENT, Reporter
from forerun.resolve.job_corpus import own_tokenizer_files
from forerun.resolve.resolve_model import tokenizer_of
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.model_code import use_code_of
from forerun.run_folder.run_folder import RunFolder, require_run
from forerun.safe_text import redact
from forerun.track.metrics import read_metrics
from forerun.trained_model.chat_form import ChatForm, own_chat_form, turn_ends, write_chat
from forerun.trained_model.load_model import abstract_plain_params, fsdp_mesh, method_params, run_params, saved_params
from forerun.trained_model.peft_folder import write_adapter
from forerun.units import MIB
from forerun.verbs.export.custom import add_usage, write_custom
from forerun.verbs.export.folder import reserved, unfinished
from forerun.verbs.export.gguf import add_gguf, require_gguf_form
from forerun.verbs.export.result import Export, ExportForm
from forerun.weights_io import documents
from forerun.weights_io.adapter import adapters_of, new_rows_of
from forerun.weights_io.card import CURVE, ModelCard, card, curve
from forerun.weights_io.match import Stacked, matches
from forerun.weights_io.packed import float_dtypes, opened_snapshot, section_of, write_packed, write_scales
from forerun.weights_io.read import read_params
from forerun.weights_io.scales import rounded_weights
from forerun.weights_io.write import first_difference, open_others, write_params

INSIDE = "adapter"  # the folder of the adapters in that of a base of integers
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Text that is in no training data: written for this purpose, with digits, accents and a line of code.
HELD_OUT = """The ferry left at 6:45, eleven minutes late, with forty-three bicycles and a brass band asleep on deck.
A child counted the lighthouses: one, two, five, no, four. "They blink in primes: 2, 3, 5, 7, 11. C'est drôle!"
def tide(hour): return 1.8 + 0.7 * sin(hour * 3.1416 / 6.21)
Nobody answered; the gulls had heard it before, and the captain was writing a letter to his glacier."""


def write_export(
    run: RunFolder, target: Path, form: ExportForm, *, code: str | None = None, reporter: Reporter = SILENT
) -> Export:
    """Write a checkpoint of a run as a Hugging Face folder, read it back and compare it.

    A run with a custom class becomes a folder with its weights and its source files.

    Args:
      run: the folder of the run.
      target: the folder to write.
      form: the checkpoint and the form of the weights.
      code: the folder with the run's custom model class, if it has moved since the training.
      reporter: receives a line for each part of the work.
    """
    resolved = ResolvedJob(require_run(run, reporter))
    with reserved(target):
        use_code_of(str(run.path), run, resolved.job, code, reporter)
        if form.gguf is not None:
            require_gguf_form(resolved, form.gguf, form.merge)
        if resolved.model_facts.is_plugin:
            return _export_custom(run, resolved, target, form, reporter)
        if form.only_adapters or (resolved.job.method.exports_adapter and not form.merge):
            return _export_adapter(run, resolved, target, form, reporter)
        return _export_model(run, resolved, target, form, reporter)


def _export_model(run: RunFolder, resolved: ResolvedJob, target: Path, form: ExportForm, reporter: Reporter) -> Export:
    """Write the complete model of a known family."""
    job = resolved.job
    family, base = _family_of(resolved)
    config, tokenizer = resolved.config, tokenizer_of(resolved)
    assert config is not None, "`_export_custom` exports a class of the user's own"
    model: Any = resolved.model
    dtypes = _dtypes(resolved, form.dtype)

    step = chosen_step(run.checkpoints(job), str(form.step))
    reporter.info(f"weights of step {step} from {run.checkpoints(job)}")
    mesh = fsdp_mesh(job)
    codes, section, trained = None if form.dense or form.merge else job.method.integer_weights, {}, None
    if codes or has_scales(job):
        whole = method_params(run, step, resolved, mesh)
    if codes:
        params = _floats(lowrank.bare(whole), mesh)
    else:
        params = run_params(run, step, resolved, mesh, job.precision.params)
    if job.method.trains_adapters and not codes:
        specs = run_specs(resolved)
        trained = {f"{path}.value" for path in adapters_of(specs)}  # all other weights are the base's
        trained |= new_rows_of(specs).keys()
    elif codes or has_scales(job):
        trained = surely_moved(resolved, lowrank.bare(whole))
    with unfinished(target) as part, copied_tensors(base) as others:
        if codes:
            reporter.info(f"writing {family.model_type} weights as {codes}, others as {_described(dtypes)}")
            with jax.set_mesh(mesh):
                section = {QUANTIZATION: write_packed(part, lowrank.bare(whole), family, model, dtypes, others)}
            if job.method.trains_adapters:
                reporter.info(f"writing adapters to {target / INSIDE}")
                (part / INSIDE).mkdir()
                write_adapter(part / INSIDE, whole, job, family, model, target.name)
        else:
            reporter.info(f"writing {family.model_type} weights as {_described(dtypes)}")
            write_params(part, params, family.table, model, dtypes, others=others)
            if has_scales(job):
                with jax.set_mesh(mesh):
                    write_scales(part, whole, family, model)
        most = dtypes if isinstance(dtypes, str) else max(dtypes.values(), key=list(dtypes.values()).count)
        ends = int(tokenizer.eos)
        base_config = config_without(base) if base else None
        chat = own_chat_form(run, job, base, tokenizer)
        content = documents.config_json(family, config, base_config, most, ends)
        if chat and chat.end.token is not None:
            documents.set_text_value(content, "eos_token_id", chat.end.token)
        if job.model.added_tokens:
            documents.set_text_value(content, "vocab_size", config.vocab)
        documents.write_json(part / "config.json", content | section)
        write_words(job, base, tokenizer, chat, part)
        if base is not None and family.wrapper is not None:
            documents.copy_files(base.processor_files, part)
        reporter.info("reading it back and comparing")
        proof = _proof(part, resolved, family, params, tokenizer, mesh, base, trained)
        if base is not None and others is not None:
            proof += compared_others(part, base, others)
        write_card(part, run, job, base, proof)
        gguf = None if form.gguf is None else add_gguf(part, job, form.gguf, reporter)
        part.rename(target)
    return Export(
        target,
        proof,
        step=step,
        inside=target / INSIDE if codes and job.method.trains_adapters else None,
        gguf=None if gguf is None else replace(gguf, path=target / gguf.path.name),
    )


def _floats(params: Any, mesh: Any) -> Any:
    """Return every weight as one float32 matrix, which represents a rounded weight exactly."""
    with jax.set_mesh(mesh):
        return jax.jit(lambda p: jax.tree.map(lambda x: x.astype("float32"), lowrank.plain(p, "float32")))(params)


def _export_adapter(
    run: RunFolder, resolved: ResolvedJob, target: Path, form: ExportForm, reporter: Reporter
) -> Export:
    job = resolved.job
    if form.dtype is not None:
        raise UserError(
            "E-RUN-019",
            f"--dtype {form.dtype} is for a complete model",
            why=f"the adapters of {run.path} are written as they were trained, in {job.precision.params}",
            fix="remove --dtype, or add --merge to write the complete model",
        )
    family, base = _family_of(resolved)
    step, tokenizer = chosen_step(run.checkpoints(job), str(form.step)), tokenizer_of(resolved)
    reporter.info(f"adapters of step {step} from {run.checkpoints(job)}")
    checkpoint = resolved.model_facts.checkpoint
    if checkpoint is not None and resolved.vocab > (rows := checkpoint.config.vocab):
        reporter.info(
            f"new tokens: PEFT needs base.resize_token_embeddings({resolved.vocab}), because the base has {rows} rows"
        )
    params = saved_params(run, step, resolved, fsdp_mesh(job))
    with unfinished(target) as part:
        name = None if base is None else base.name if base.revision else str(base.folder.resolve())
        tensors = write_adapter(part, params, job, family, resolved.model, name)
        proof = (
            f"Read back from disk: all {tensors} tensors of the adapters are those of the trained state, bit for bit."
        )
        chat = own_chat_form(run, job, base, tokenizer)
        write_words(job, base, tokenizer, chat, part)
        write_card(part, run, job, base, proof, library="peft")
        part.rename(target)
    return Export(target, proof, is_adapter=True, step=step)


def _export_custom(run: RunFolder, resolved: ResolvedJob, target: Path, form: ExportForm, reporter: Reporter) -> Export:
    """Write the weights of a custom class, with adapters merged, and its source files."""
    job = resolved.job
    dtype = form.dtype or job.precision.params
    step, tokenizer = chosen_step(run.checkpoints(job), str(form.step)), tokenizer_of(resolved)
    reporter.info(f"weights of step {step} from {run.checkpoints(job)}")
    params = run_params(run, step, resolved, fsdp_mesh(job), job.precision.params)
    chat = own_chat_form(run, job, None, tokenizer)
    with unfinished(target) as part:
        reporter.info(f"writing weights of {job.model.name} as {dtype}, and its source files")
        proof = write_custom(part, run, resolved, params, dtype, chat.end.token if chat else None)
        write_words(job, None, tokenizer, chat, part)
        write_card(part, run, job, None, proof, library="forerun")
        add_usage(part, resolved, target.name)
        part.rename(target)
    return Export(target, proof, is_custom=True, step=step)


def _family_of(resolved: ResolvedJob) -> tuple[Family, Snapshot | None]:
    """Return the family, and the files of the base model if there is one; its weights are fetched."""
    if resolved.model_facts.checkpoint is not None:
        checkpoint = resolved.model_facts.downloaded_checkpoint
        return checkpoint.family, checkpoint.snapshot
    assert resolved.config is not None, "`_export_custom` exports a class of the user's own"
    return family_for(resolved.config), None


def _dtypes(resolved: ResolvedJob, dtype: str | None) -> str | dict[str, str]:
    """Return the dtype of all weights, or for a base model the dtype of each of its tensors."""
    if dtype:
        return DTYPES[dtype]
    if resolved.model_facts.checkpoint is None:
        return DTYPES[resolved.job.precision.params]
    checkpoint = resolved.model_facts.downloaded_checkpoint
    return float_dtypes(checkpoint.snapshot, checkpoint.family.table, model_for(checkpoint.config))


def _described(dtypes: str | dict[str, str]) -> str:
    return dtypes if isinstance(dtypes, str) else " and ".join(sorted(set(dtypes.values())))


def write_words(job: Job, base: Snapshot | None, tokenizer: Tokenizer, chat: ChatForm | None, folder: Path) -> None:
    """Write the tokenizer, generation_config.json and, if the job gives one, the chat template."""
    given, own, end = job.data.tokenizer, own_tokenizer_files(job.data), int(tokenizer.eos)
    if own is not None:
        documents.copy_files(own.tokenizer_files, folder)
        documents.complete_tokenizer(folder, end)
    elif base is not None and given is None:
        documents.copy_files(base.tokenizer_files, folder)
    else:
        documents.write_tokenizer(tokenizer_path(given) if given and given != "bytes" else None, folder, end)
    of_base = base.json("generation_config.json") if base else None
    generation: dict[str, Any] = {"eos_token_id": end} if of_base is None else dict(of_base)
    if job.model.added_tokens:
        documents.replace_tokenizer(Path(tokenizer.path), folder)
    if own is not None:
        generation["eos_token_id"] = turn_ends(own, tokenizer, generation)
    documents.write_json(folder / "generation_config.json", generation)
    if chat is not None:
        write_chat(folder, chat, tokenizer, generation)


def _proof(
    folder: Path,
    resolved: ResolvedJob,
    family: Family,
    params: Any,
    tokenizer: Tokenizer,
    mesh: Any,
    base: Snapshot | None,
    trained: set[str] | None,
) -> str:
    """Compare the written folder with the trained state, and return a sentence about the result.

    Raises:
      UserError: The folder differs from the trained state.
    """
    model, checkpoint = resolved.model, resolved.model_facts.checkpoint
    back = snapshot(str(folder.absolute()))
    config = read_snapshot(back, str(folder / "config.json")).config
    ids = checkpoint_tokenizer(back).encode(HELD_OUT)
    if ids.tolist() != tokenizer.encode(HELD_OUT).tolist():
        raise _failed("the tokenizer that was written gives other tokens")
    again = model_for(config)
    wanted = abstract_plain_params(again, mesh, "float32")
    with opened_snapshot(back) as weights:
        written = {info.dtype for info in weights.values()}
        read = read_params(weights, family.table, again, wanted)
        # New tokens may have changed the vocabulary, so the base is read with the dimensions of its own files.
        changed = ""
        if base is not None and checkpoint is not None:
            changed = _changed(weights, base, family, model_for(checkpoint.config), trained)
    rounded = params if written == {"F32"} else _rounded(params, read)
    got, expected, exact = (_logits(m, p, ids, mesh) for m, p in ((again, read), (model, rounded), (model, params)))
    if not np.array_equal(got, expected) or not np.isfinite(got).all():
        raise _failed(f"its logits differ from the trained state's by up to {np.abs(got - expected).max():.3g}")
    lost = np.abs(got - exact).max()
    rounding = f"; rounding the weights moved a logit by up to {lost:.2g}" if lost else ""
    return (
        f"Read back from disk: on {len(ids)} tokens of text that is in no data set the logits are those of the trained "
        f"state to the last bit{rounding}.{changed}"
    )


def _rounded(params: Any, read: Any) -> Any:
    """Return the trained weights as the file stores them: as read back, where rounding explains the difference."""

    def leaf(path: Any, trained: jax.Array, back: jax.Array) -> jax.Array:
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            candidate = trained.astype(dtype).astype(back.dtype)
            if bool(jnp.array_equal(candidate, back)):
                return candidate
        raise _failed(f"{jax.tree_util.keystr(path)} is not what was trained")

    return jax.tree_util.tree_map_with_path(leaf, params, read)


def _logits(model: Model, params: Any, ids: Any, mesh: Any) -> Any:
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    tokens = np.broadcast_to(np.asarray(ids, np.int32), (rows, len(ids)))
    where = np.broadcast_to(np.arange(len(ids), dtype=np.int32), tokens.shape)

    def run(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return model.apply(params, tokens, jnp.ones_like(tokens), positions, Compute()).logits()[0]

    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(run)(params, tokens, where))


def _changed(weights: Weights, base: Snapshot, family: Family, model: Stacked, trained: set[str] | None) -> str:
    """Check that training changed the weights: a matrix that equals the base was never trained, or never saved.

    `trained` are the paths that training can change; None means all.
    """
    same = []
    with opened_snapshot(base) as before:
        found = matches(before, family.table, model)
        for match in found:
            one, other = weights.view(match.entry.name), before.view(match.name)
            if np.array_equal(one, other.astype(one.dtype)):
                same.append(match.entry)
            del one, other
            weights.release(match.entry.name)
            before.release(match.name)
    moves = [entry for entry in same if trained is None or trained & {piece.path for piece in entry.pieces}]
    if matrices := [entry.name for entry in moves if len(entry.shape) > 1]:
        raise _failed(
            f"{len(matrices)} of {len(found)} tensors are bit for bit those of {base.name}: {', '.join(matrices[:5])}"
        )
    return f" {len(found) - len(same)} of {len(found)} tensors differ from {public_name(base.name)}."


def _failed(what: str) -> UserError:
    return UserError(
        "E-RUN-023",
        f"the export was not proven: {what}",
        why="what was written is read back and compared before it counts; the folder was removed",
        fix="export again; if it fails again, please report it with this text",
    )


# ---- Tensors of a multimodal checkpoint beside its text model: an export keeps them byte for byte ----


@contextmanager
def copied_tensors(base: Snapshot | None) -> Iterator[Weights | None]:
    """Open the tensors of the base that the run did not train, and yield them, or None if it has only text."""
    if base is None:
        yield None
        return
    with open_others(base) as others:
        yield others


def compared_others(folder: Path, base: Snapshot, others: Weights) -> str:
    """Return a sentence about the tensors that an export copied.

    Raises:
      UserError: a copied tensor is not that of the base.
    """
    with open_others(snapshot(str(folder.absolute()))) as written:
        assert written is not None, "the export has the config.json of a multimodal model"
        name = first_difference(others, written)
    if name is not None:
        raise UserError(
            "E-WEIGHTS-031",
            f"the export was not proven: {name} is not that of {base.name}",
            why="tensors beside the text model must be copied byte for byte; the folder was removed",
            fix="make sure that no other process writes to the base model, then export again",
        )
    return f" The {len(others)} tensors beside the text model are byte for byte those of {public_name(base.name)}."


# ---- Runs with rounded weights ----


def config_without(source: Snapshot) -> dict[str, Any]:
    """Return config.json without its section on integers."""
    return {key: value for key, value in source.config().items() if key != QUANTIZATION}


def has_scales(job: Job) -> bool:
    """Return whether a dense export has scales to record: not if adapters were multiplied into the weights."""
    return job.method.trains_rounded_weights


def integer_section(resolved: ResolvedJob) -> dict[str, Any] | None:
    """Return the `quantization_config` of an export of integers. None if a tensor has no integer form (GPT-2)."""
    family, model = resolved.model_facts.family, resolved.model
    assert family is not None, "`export` rejects a model without a family"
    try:
        return section_of(run_specs(resolved), family, cast(Stacked, model))
    except UserError:  # the only errors of `section_of` are about tensors without an integer form
        return None


def surely_moved(resolved: ResolvedJob, params: Any) -> set[str] | None:
    """Return paths of the weights that a run with `qat` surely changes; None: all.

    Codes that the base had before may all stay as they were, and under adapters they do.
    """
    rounded = {f"{path}.value" for path in rounded_weights(params)}
    kept = kept_rounding(resolved) is not None
    if resolved.job.method.trains_adapters:
        return set() if kept else rounded
    return set(leaves_of(resolved.model.specs())) - rounded if kept else None


# ---- Model card ----


def write_card(
    folder: Path, run: RunFolder, job: Job, base: Snapshot | None, proof: str, library: str = "transformers"
) -> None:
    """Write the model card and the loss curve of an exported run."""
    summary = json.loads(read_regular(run.summary, MIB)) if run.summary.exists() else {}
    taken = [line for line in read_metrics(run.metrics) if line.get("loss") is not None]
    losses = [(int(line["step"]), float(line["loss"])) for line in taken]
    counted = {"steps": losses[-1][0] if losses else 0, "tokens": 0, "parameters": 0, **summary}
    story = ModelCard(
        name=job.name,
        base=public_name(job.model.name or "") if base else None,
        revision=base.revision if base else None,
        job=_as_written(job),
        data=[Path(redact(part.path)).name for part in job.data.parts.values()],
        sequence=job.sequence,
        summary=counted,
        losses=losses,
        cost=_cost(counted),
        proof=proof,
        library=library,
    )
    atomic_write(folder / CURVE, curve(losses, counted.get("loss_unit", "nats per token")))
    atomic_write(folder / "README.md", card(story))


def _as_written(job: Job) -> str:
    """Return the values that differ from their defaults, without paths of this machine."""
    given = job.data.model_dump(include={"path", "tokenizer", "chat_template"})
    data = {name: value and public_name(value) for name, value in given.items()}
    mixture = {
        name: part.model_copy(update={"path": public_name(part.path)}) for name, part in job.data.mixture.items()
    }
    public = {
        "model": job.model.model_copy(update={"name": job.model.name and public_name(job.model.name)}),
        "data": job.data.model_copy(update={**data, "mixture": mixture, "store": None}),
        "runs": type(job).model_fields["runs"].default,
    }
    start = job.method.initial_adapter
    return dump(job.model_copy(update=public).with_initial_adapter(start and public_name(start)), defaults=False)


def public_name(name: str) -> str:
    """Return the name of a model without the folders of this machine."""
    return Path(name).name if is_folder(name) else name


def _cost(summary: dict[str, Any]) -> str:
    """Return the measured hours times the list price as text, if a price is known."""
    device, seconds = summary.get("device") or {}, summary.get("train_seconds")
    price = cheapest(device["chip"], hosts=1) if device.get("chip") and seconds else None
    if price is None or not seconds:
        return "no price is known for this device"
    usd = seconds / 3600 * device["count"] * price.usd_per_chip_hour_on_demand
    return f"${usd:,.2f} at the list price of {price.date} in {price.place}, on demand"
