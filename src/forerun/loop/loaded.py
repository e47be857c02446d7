"""A model ready to be asked: from a run's folder, a Hugging Face folder or a name on the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from forerun.checkpoint.weights import newest_step, restore_weights
from forerun.config import schema
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer
from forerun.errors import UserError
from forerun.exchange.packed import weights_of
from forerun.exchange.read import OnProgress, no_progress, read_params
from forerun.exchange.scales import are_multiples
from forerun.hardware.devices import choose
from forerun.hardware.mesh import MeshShape, check_model, resolve
from forerun.hub.snapshot import Snapshot
from forerun.loop.chat_form import chat_form, end_ids
from forerun.loop.code import use_code_of
from forerun.loop.corpus import special_texts, tokenizer_of
from forerun.loop.folder import RunFolder, job_of_run
from forerun.loop.model_source import checkpoint_section
from forerun.methods.kept import adapter_inside
from forerun.methods.method import MODEL, method_of
from forerun.models.base import Model
from forerun.models.pretrained import is_checkpoint, pretrained
from forerun.models.registry import model_for, model_of
from forerun.models.rounding import RECORD
from forerun.nn import lowrank, spec
from forerun.nn.compute import Compute
from forerun.nn.sharding import stored
from forerun.program import kernels
from forerun.program.build import make_mesh
from forerun.program.state import abstract_params


@dataclass(frozen=True)
class Loaded:
    name: str
    model: Model
    params: Any
    mesh: Mesh
    compute: Compute
    tokenizer: Tokenizer
    eos: frozenset[int]  # each of them ends an answer
    chat_template: str | None
    special: Mapping[str, str]  # texts of special tokens, for the chat template
    template_origin: str | None = None  # for errors: where a template comes from that is not the model's own
    turn_stop: tuple[str, ...] = ()  # texts that end a turn where no single token does
    special_tokens: bool = False  # special tokens that are written out in a message count as such
    step: int | None = None  # of a run's checkpoint


def load_model(
    source: str,
    *,
    revision: str | None = None,
    device: str = "auto",
    devices: int | None = None,
    mesh: MeshShape | None = None,
    dtype: str | None = None,
    code: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Loaded:
    """Weights and computation in `dtype` (None: bfloat16, but float32 on a CPU, which has no arithmetic for it), laid
    out over the mesh (all devices along fsdp unless given). `code` is the folder of a run's own model class, if it is
    not where it was. `tell` gets a line about damage to a run's `job.yaml`, and about code that has changed."""
    folder = RunFolder(Path(source))
    run = job_of_run(folder, tell)
    section = run.model if run else checkpoint_section(source, revision)
    use_code_of(source, folder, run, code, tell)
    chosen = choose(device, devices)
    dtype = dtype or ("float32" if chosen.platform == "cpu" else "bfloat16")
    model = model_of(section)
    shape = mesh or resolve(1, -1, 1, len(chosen.devices))
    check_model(shape, model.heads, shape.data_parallel, None)
    grid = make_mesh(shape, chosen.devices)
    first = chosen.devices[0]
    compute = Compute(jnp.dtype(dtype), kernels.attention("auto", first.platform, first.device_kind, dtype, model))
    wanted = wanted_params(model, grid, dtype)
    step = None
    if run is not None:
        step = newest_step(folder.checkpoints(run))
        params = run_params(folder, step, run, model, grid, dtype)
        tokenizer = tokenizer_of(run)
    else:
        params = pretrained_params(section, wanted)
        tokenizer = checkpoint_tokenizer(pretrained(section).snapshot)
    snapshot = pretrained(section).snapshot if is_checkpoint(section) else None
    if run is None and (adapter := adapter_inside(section)):
        tell(f"the adapter in {adapter} is not applied: these are the weights of its base")
    chat = chat_form(folder if run is not None else None, run, snapshot, tokenizer)
    return Loaded(
        name=source,
        model=model,
        params=params,
        mesh=grid,
        compute=compute,
        tokenizer=tokenizer,
        eos=frozenset(end_ids(chat, tokenizer.eos, *_ends(snapshot))),
        chat_template=chat.template if chat else None,
        special=special_texts(snapshot),
        template_origin=chat.origin if chat else None,
        turn_stop=chat.end.stop if chat else (),
        special_tokens=run is not None and run.data.special_tokens,
        step=step,
    )


def whole_mesh(job: schema.Job) -> Mesh:
    """All devices that are here, the weights split over them."""
    chosen = choose(job.device, job.devices)
    return make_mesh(resolve(1, -1, 1, len(chosen.devices)), chosen.devices)


def wanted_params(model: Model, mesh: Mesh, dtype: str) -> Any:
    """Shapes of the parameters as they rest on the mesh."""

    def placed(s: spec.ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype), sharding=stored(mesh, s.shape, s.axes))

    return spec.map_specs(placed, model.specs())


def pretrained_params(section: schema.Model, wanted: Any, on_progress: OnProgress = no_progress) -> Any:
    """The weights of a checkpoint, fetched if need be, from its files to the devices."""
    found = pretrained(section, weights=True)
    with weights_of(found) as (weights, scales):
        params = read_params(weights, found.family.table, model_for(found.config), wanted, on_progress, scales)
    if found.recorded is not None and not are_multiples(params):
        raise UserError(
            f"the scales in {found.snapshot.folder / RECORD} are not those of the weights beside them",
            why="some weights are not an integer times their scale: they were changed after the export",
            fix=f"remove the folder {found.snapshot.folder / RECORD}, and the weights are rounded anew",
        )
    return params


def run_params(folder: RunFolder, step: int, job: schema.Job, model: Model, mesh: Mesh, dtype: str) -> Any:
    """A run's weights at a step (the moving average if it has one) as the model has them without any method: adapters
    are multiplied in. In `dtype`."""
    params = method_params(folder, step, job, model, mesh)
    plain = spec.map_specs(lambda s: stored(mesh, s.shape, s.axes), model.specs())

    def finished(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), lowrank.plain(params, dtype))

    if job.precision.params == dtype and same_structure(params, plain):
        return params
    with jax.set_mesh(mesh):
        return jax.jit(finished, out_shardings=plain)(params)


def same_structure(one: Any, other: Any) -> bool:
    return bool(jax.tree.structure(one) == jax.tree.structure(other))  # type: ignore[operator]


def method_params(folder: RunFolder, step: int, job: schema.Job, model: Model, mesh: Mesh) -> Any:
    """A run's own weights at a step with the leaf types of its method; what is not saved comes from the files."""
    job = job.model_copy(update={"objective": None})  # one of the user's own adds nothing to the weights
    method, params = method_of(job, chunk=1), saved_params(folder, step, job, model, mesh)
    before = spec.cast(model.specs(), jnp.dtype(job.precision.params))
    specs = method.objective.own(method.specs(before))
    if same_structure(params, abstract_params(specs, mesh)):
        return params
    saved, reads = spec.map_specs(lambda s: s.saved, specs), method.reads(before)
    given = {MODEL: pretrained_params(job.model, abstract_params(reads, mesh))} if is_checkpoint(job.model) else {}

    def rest(given: dict[str, Any], key: jax.Array) -> Any:
        own = given[MODEL] if given else method.fresh(before, key)
        return spec.split(method.dressed(before, own, given, key), saved)[1]

    with jax.set_mesh(mesh):
        return spec.merge(params, jax.jit(rest)(given, jax.random.key(job.seed)))


def saved_params(folder: RunFolder, step: int, job: schema.Job, model: Model, mesh: Mesh) -> Any:
    """What the checkpoint of a step holds of a run's own weights (their moving average if it has one); None in the
    places of what is not saved."""
    method, checkpoints = method_of(job, chunk=1), folder.checkpoints(job)
    specs = method.specs(spec.cast(model.specs(), jnp.dtype(job.precision.params)))
    like = abstract_params(specs, mesh)
    params = restore_weights(checkpoints, step, spec.split(like, spec.map_specs(lambda s: s.saved, specs))[0])
    if job.optimizer.ema is not None:
        learning = spec.split(like, spec.map_specs(lambda s: s.trainable, specs))[0]
        params = spec.merge(restore_weights(checkpoints, step, learning, part="average"), params)
    return method.objective.own(params)


def _ends(snapshot: Snapshot | None) -> set[int]:
    """generation_config.json and config.json name one id or several."""
    found: set[int] = set()
    for content in (snapshot.json("generation_config.json"), snapshot.json("config.json")) if snapshot else ():
        ids = (content or {}).get("eos_token_id")
        found |= {one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)}
    return found
