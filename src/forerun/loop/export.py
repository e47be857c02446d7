"""`forerun export`: a run as a Hugging Face folder, which is read back and compared before it gets its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.checkpoint.weights import chosen_step
from forerun.config.load import dump
from forerun.config.schema import Job
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer, tokenizer_path
from forerun.errors import UserError
from forerun.exchange import documents
from forerun.exchange.adapter import adapters_of
from forerun.exchange.card import CURVE, Story, card, curve
from forerun.exchange.match import Stacked, matches
from forerun.exchange.packed import float_dtypes, opened_snapshot, write_packed, write_scales
from forerun.exchange.read import read_params
from forerun.exchange.write import write_params
from forerun.files import atomic_write, read_regular
from forerun.hardware.prices import cheapest
from forerun.hub.snapshot import Snapshot, snapshot
from forerun.hub.weights import Weights
from forerun.interrupt import cleanup
from forerun.loop.adapter import write_adapter
from forerun.loop.chat_form import ChatForm, own_chat_form, write_chat
from forerun.loop.corpus import tokenizer_of
from forerun.loop.folder import RunFolder, job_of_run
from forerun.loop.loaded import method_params, run_params, saved_params, wanted_params, whole_mesh
from forerun.loop.rounding import config_without, has_scales, surely_moved
from forerun.methods.method import method_of
from forerun.models.base import Model
from forerun.models.families.base import Family
from forerun.models.families.registry import family_for, read_config
from forerun.models.pretrained import config_of, is_checkpoint, pretrained
from forerun.models.registry import model_for
from forerun.models.rounding import QUANTIZATION
from forerun.models.sizes import is_plugin
from forerun.nn import lowrank
from forerun.nn.compute import Compute
from forerun.safe_text import redact
from forerun.track.metrics import read_metrics
from forerun.units import MIB

INSIDE = "adapter"  # the folder of the adapters in that of a base of integers
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Nobody's training data: written for this purpose, with digits, accents and a line of code.
HELD_OUT = """The ferry left at 6:45, eleven minutes late, with forty-three bicycles and a brass band asleep on deck.
A child counted the lighthouses: one, two, five, no, four. "They blink in primes: 2, 3, 5, 7, 11. C'est drôle!"
def tide(hour): return 1.8 + 0.7 * sin(hour * 3.1416 / 6.21)
Nobody answered; the gulls had heard it before, and the captain was writing a letter to his glacier."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    folder: Path
    proof: str
    is_adapter: bool = False
    inside: Path | None = None  # the adapters' folder in that of a base of integers


def export(
    source: str,
    to: str,
    *,
    dtype: str | None = None,
    merge: bool = False,
    dense: bool = False,
    which: str = "newest",
    say: Say = lambda words: None,
) -> Exported:
    """A checkpoint of a run (newest, best or a step): the whole model, or its adapters if it has some, unless `merge`.

    `dtype` is of all weights; None: the base model's own, or the run's. What learned as integers is written so, unless
    `dense`."""
    run, target = RunFolder(Path(source)), Path(to)
    job = _job_of(run, say)
    _require_free(target)
    if job.lora is not None and job.qat is None and not merge:
        return _export_adapter(run, job, target, dtype, which, say)
    family, base = _family_of(job)
    config = config_of(job.model)
    model, tokenizer = model_for(config), tokenizer_of(job)
    dtypes = _dtypes(job, base, family, model, dtype)

    step = chosen_step(run.checkpoints(job), which)
    say(f"weights of step {step} from {run.checkpoints(job)}")
    mesh = whole_mesh(job)
    codes, section, trained = None if dense or merge else job.qat, {}, None
    if codes or has_scales(job):
        whole = method_params(run, step, job, model, mesh)
    if codes:
        params = _floats(lowrank.bare(whole), mesh)
    else:
        params = run_params(run, step, job, model, mesh, job.precision.params)
    if job.lora is not None and not codes:
        trained = _adapted(job, model)
    elif codes or has_scales(job):
        trained = surely_moved(job, model, lowrank.bare(whole))
    with _in_the_making(target) as part:
        if codes:
            say(f"writing {family.model_type} weights as {codes.weights}, others as {_described(dtypes)}")
            with jax.set_mesh(mesh):
                section = {QUANTIZATION: write_packed(part, lowrank.bare(whole), family.table, model, dtypes)}
            if job.lora is not None:
                say(f"writing adapters to {target / INSIDE}")
                (part / INSIDE).mkdir()
                write_adapter(part / INSIDE, whole, job, family, model, target.name)
        else:
            say(f"writing {family.model_type} weights as {_described(dtypes)}")
            write_params(part, params, family.table, model, dtypes)
            if has_scales(job):
                with jax.set_mesh(mesh):
                    write_scales(part, whole, family.table, model)
        most = dtypes if isinstance(dtypes, str) else max(dtypes.values(), key=list(dtypes.values()).count)
        ends = int(tokenizer.eos)
        base_config = config_without(base) if base else None
        chat = own_chat_form(run, job, base, tokenizer)
        content = documents.config_json(family, config, base_config, most, ends)
        if chat and chat.end.token is not None:
            content["eos_token_id"] = chat.end.token
        documents.write_json(part / "config.json", content | section)
        _write_words(job, base, tokenizer, chat, part)
        say("reading it back and comparing")
        proof = _proof(part, family, model, params, tokenizer, mesh, base, trained)
        _write_card(part, run, job, base, proof)
        part.rename(target)
    return Exported(target, proof, inside=target / INSIDE if codes and job.lora is not None else None)


def _floats(params: Any, mesh: Any) -> Any:
    """Every weight as one matrix in float32, which holds a rounded one to the last bit."""
    with jax.set_mesh(mesh):
        return jax.jit(lambda p: jax.tree.map(lambda x: x.astype("float32"), lowrank.plain(p, "float32")))(params)


def _export_adapter(run: RunFolder, job: Job, target: Path, dtype: str | None, which: str, say: Say) -> Exported:
    if dtype is not None:
        raise UserError(
            f"--dtype {dtype} is for a whole model",
            why=f"the adapters of {run.path} are written as they were trained, in {job.precision.params}",
            fix="leave --dtype out, or add --merge to write the whole model",
        )
    family, base = _family_of(job)
    model, step = model_for(config_of(job.model)), chosen_step(run.checkpoints(job), which)
    say(f"adapters of step {step} from {run.checkpoints(job)}")
    params = saved_params(run, step, job, model, whole_mesh(job))
    with _in_the_making(target) as part:
        name = job.model.name if base else None
        tensors = write_adapter(part, params, job, family, model, name and _public(name))
        proof = (
            f"Read back from disk: all {tensors} tensors of the adapters are those of the trained state, bit for bit."
        )
        if chat := own_chat_form(run, job, base, tokenizer_of(job)):  # else the base's files are those of the adapters
            _write_words(job, base, tokenizer_of(job), chat, part)
        _write_card(part, run, job, base, proof, library="peft")
        part.rename(target)
    return Exported(target, proof, is_adapter=True)


def _adapted(job: Job, model: Model) -> set[str]:
    """Paths of the weights that have an adapter, as `Piece.path` says them. All else is the base's."""
    specs = method_of(job, chunk=1).specs(model.specs())
    return {f"{path}.value" for path in adapters_of(specs)}


def _job_of(run: RunFolder, say: Say) -> Job:
    job = job_of_run(run, say)
    if job is None:
        raise UserError(
            f"{run.path} is no run",
            why=f"there is no {run.job}",
            fix="give the folder of a run, for example runs/quickstart",
        )
    if is_plugin(job.model):
        raise UserError(
            f"a model of your own ({job.model.name}) has no Hugging Face form",
            why="transformers could not compute it",
            fix="its weights are in the run's checkpoints, which Orbax reads",
        )
    return job


def _require_free(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{target} exists already",
            why="an export never writes over anything",
            fix="remove it, or give another folder after --to",
        )


def _family_of(job: Job) -> tuple[Family, Snapshot | None]:
    if is_checkpoint(job.model):
        found = pretrained(job.model, weights=True)
        return found.family, found.snapshot
    return family_for(config_of(job.model)), None


def _dtypes(
    job: Job, base: Snapshot | None, family: Family, model: Stacked, wanted: str | None
) -> str | dict[str, str]:
    if wanted:
        return DTYPES[wanted]
    if base is None:
        return DTYPES[job.precision.params]
    return float_dtypes(base, family.table, model)


def _described(dtypes: str | dict[str, str]) -> str:
    return dtypes if isinstance(dtypes, str) else " and ".join(sorted(set(dtypes.values())))


@contextmanager
def _in_the_making(target: Path) -> Iterator[Path]:
    """A folder beside the target; whatever goes wrong, nothing of it is left."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if target.exists():
        target.rmdir()  # empty
    try:
        with cleanup(lambda: shutil.rmtree(part, ignore_errors=True)):
            yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_words(job: Job, base: Snapshot | None, tokenizer: Tokenizer, chat: ChatForm | None, folder: Path) -> None:
    """Write the tokenizer, generation_config.json and, if the job gives one, the chat template."""
    given, end = job.data.tokenizer, int(tokenizer.eos)
    if base is not None and given is None:
        documents.copy_tokenizer(base, folder)
    else:
        documents.write_tokenizer(tokenizer_path(given) if given and given != "bytes" else None, folder, end)
    generation = documents.generation_json(base.json("generation_config.json") if base else None, end)
    documents.write_json(folder / "generation_config.json", generation)
    if chat is not None:
        write_chat(folder, chat, tokenizer, generation)


def _proof(
    folder: Path,
    family: Family,
    model: Model,
    params: Any,
    tokenizer: Tokenizer,
    mesh: Any,
    base: Snapshot | None,
    trained: set[str] | None,
) -> str:
    """One sentence on what was compared, or an error."""
    back = snapshot(str(folder.absolute()))
    _, config = read_config(config_without(back), str(folder / "config.json"))
    ids = checkpoint_tokenizer(back).encode(HELD_OUT)
    if ids.tolist() != tokenizer.encode(HELD_OUT).tolist():
        raise _failed("the tokenizer that was written gives other tokens")
    again = model_for(config)
    wanted = wanted_params(again, mesh, "float32")
    with opened_snapshot(back) as weights:
        written = {info.dtype for info in weights.values()}
        read = read_params(weights, family.table, again, wanted)
        changed = _changed(weights, base, family, again, trained) if base else ""
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
    """The trained weights as the file holds them: what was read back, leaf by leaf only where rounding explains it."""

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
    """That training has moved the weights: a matrix that is still the base's was never trained, or never saved.
    `trained` are the paths that could move; None: all."""
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
    return f" {len(found) - len(same)} of {len(found)} tensors differ from {_public(base.name)}."


def _failed(what: str) -> UserError:
    return UserError(
        f"the export was not proven: {what}",
        why="what was written is read back and compared before it counts; the folder was removed",
        fix="export again; if it fails again, please report it with this text",
    )


def _write_card(
    folder: Path, run: RunFolder, job: Job, base: Snapshot | None, proof: str, library: str = "transformers"
) -> None:
    summary = json.loads(read_regular(run.summary, MIB)) if run.summary.exists() else {}
    taken = [line for line in read_metrics(run.metrics) if line.get("loss") is not None]
    losses = [(int(line["step"]), float(line["loss"])) for line in taken]
    counted = {"steps": losses[-1][0] if losses else 0, "tokens": 0, "parameters": 0, **summary}
    story = Story(
        name=job.name,
        base=_public(job.model.name or "") if base else None,
        revision=base.revision if base else None,
        job=_as_written(job),
        data=f"{_places(job)}, {job.sequence} tokens a sequence.",
        summary=counted,
        losses=losses,
        cost=_cost(counted),
        proof=proof,
        library=library,
    )
    atomic_write(folder / CURVE, curve(losses, counted.get("loss_unit", "nats per token")))
    atomic_write(folder / "README.md", card(story))


def _as_written(job: Job) -> str:
    """What differs from the defaults, without folders of this machine."""
    given = job.data.model_dump(include={"path", "tokenizer", "chat_template"})
    data = {name: value and _public(value) for name, value in given.items()}
    mixture = {name: part.model_copy(update={"path": _public(part.path)}) for name, part in job.data.mixture.items()}
    public = {
        "lora": job.lora and job.lora.model_copy(update={"start": job.lora.start and _public(job.lora.start)}),
        "model": job.model.model_copy(update={"name": job.model.name and _public(job.model.name)}),
        "data": job.data.model_copy(update={**data, "mixture": mixture, "store": None}),
        "runs": type(job).model_fields["runs"].default,
    }
    return dump(job.model_copy(update=public), defaults=False)


def _places(job: Job) -> str:
    return ", ".join(f"`{Path(redact(part.path)).name}`" for part in job.data.parts.values())


def _public(name: str) -> str:
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def _cost(summary: dict[str, Any]) -> str:
    """Measured hours times the list price, where there is one."""
    device, seconds = summary.get("device") or {}, summary.get("train_seconds")
    price = cheapest(device["chip"], hosts=1) if device.get("chip") and seconds else None
    if price is None or not seconds:
        return "no price is known for this device"
    usd = seconds / 3600 * device["count"] * price.usd_per_chip_hour_on_demand
    return f"${usd:,.2f} at the list price of {price.date} in {price.zone}, on demand"
