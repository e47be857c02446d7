"""Load a model for inference from a run's folder, a Hugging Face folder or a hub repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from forerun.checkpoint.reader import Reader, newest_step
from forerun.config import schema
from forerun.data.tokenizer import Tokenizer, checkpoint_tokenizer
from forerun.errors import UserError
from forerun.hardware.devices import choose
from forerun.hardware.mesh import MeshShape, check_model, resolve
from forerun.hub.snapshot import Snapshot
from forerun.methods.method import MODEL, method_of, model_specs, run_specs
from forerun.methods.qat import adapter_inside
from forerun.models.base import Model
from forerun.models.families.wrapper import text_of
from forerun.models.model_facts import ModelFacts, model_for
from forerun.models.quantization_config import RECORD
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.sharding import stored
from forerun.nn.weights import lowrank
from forerun.program import kernels
from forerun.program.build import make_mesh
from forerun.program.state import abstract_params
from forerun.reporter import SILENT, Reporter
from forerun.resolve.job_corpus import model_specials
from forerun.resolve.resolve_model import tokenizer_of
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.model_code import use_code_of, use_code_of_export
from forerun.run_folder.run_folder import RunFolder
from forerun.trained_model.chat_form import chat_form, end_ids
from forerun.trained_model.model_source import model_source
from forerun.weights_io.packed import weights_of
from forerun.weights_io.read import read_params
from forerun.weights_io.scales import are_multiples


@dataclass(frozen=True)
class LoadedModel:
    """A model on its devices, with everything that `generate`, `chat` and `eval` need."""

    name: str
    model: Model
    params: Any
    mesh: Mesh
    compute: Compute
    tokenizer: Tokenizer
    eos: frozenset[int]  # ids that end an answer
    chat_template: str | None
    special: Mapping[str, Any]  # texts of special tokens and other variables, for the chat template
    template_origin: str | None = None  # for errors: origin of a template that is not in the model's files
    turn_stop: tuple[str, ...] = ()  # texts that end a turn, if no single token does
    special_tokens: bool = False  # whether texts of special tokens in a message are encoded as these tokens
    step: int | None = None  # step of a run's checkpoint


def load_model(
    source: str,
    *,
    revision: str | None = None,
    device: str = "auto",
    devices: int | None = None,
    mesh: MeshShape | None = None,
    dtype: str | None = None,
    code: str | None = None,
    reporter: Reporter = SILENT,
) -> LoadedModel:
    """Load a model and place its weights on the devices.

    Args:
      source: a run's folder, a folder with a checkpoint, or a name on the hub.
      revision: the revision on the hub.
      device: the platform, or "auto".
      devices: the number of devices, or None for all.
      mesh: the mesh shape, or None for all devices along fsdp.
      dtype: the dtype of weights and computation, or None for bfloat16 (float32 on a CPU, which has no bfloat16
        arithmetic).
      code: the folder with the custom model class of an export, or of a run if the class has moved since training.
      reporter: receives messages about a damaged `job.yaml`, changed code and adapters that are not applied.

    Returns:
      The model. The weights of a run are those of its newest checkpoint, with adapters merged.
    """
    found = model_source(source, revision, reporter)
    folder, resolved, facts = found.folder, found.resolved, found.facts
    run = resolved.job if resolved else None
    if (custom := found.custom) is not None:
        use_code_of_export(source, str(facts.section.name), custom.files, code, reporter)
    else:
        use_code_of(source, folder, run, code, reporter)
    chosen = choose(device, devices)
    dtype = dtype or ("float32" if chosen.platform == "cpu" else "bfloat16")
    model = facts.model
    shape = mesh or resolve(1, -1, 1, len(chosen.devices))
    check_model(shape, model.heads, shape.data_parallel, None)
    grid = make_mesh(shape, chosen.devices)
    first = chosen.devices[0]
    capability = kernels.compute_capability(first)
    choice = kernels.attention("auto", first.platform, first.device_kind, dtype, model, capability)
    compute = Compute(jnp.dtype(dtype), choice.kernel)
    wanted = abstract_plain_params(model, grid, dtype)
    step = None
    snapshot = found.snapshot
    if resolved is not None:
        step = newest_step(folder.checkpoints(resolved.job))
        params = run_params(folder, step, resolved, grid, dtype)
        tokenizer = tokenizer_of(resolved)
    else:
        assert snapshot is not None, "what is not a run is a checkpoint"
        params = pretrained_params(facts, wanted) if custom is None else custom.params(wanted)
        tokenizer = checkpoint_tokenizer(snapshot)
    if run is None and (adapter := adapter_inside(facts)):
        reporter.warn(f"the adapter in {adapter} is not applied: these are the weights of its base")
    chat = chat_form(folder if run is not None else None, run, snapshot, tokenizer)
    return LoadedModel(
        name=source,
        model=model,
        params=params,
        mesh=grid,
        compute=compute,
        tokenizer=tokenizer,
        eos=frozenset(end_ids(chat, tokenizer.eos, *_ends(snapshot))),
        chat_template=chat.template if chat else None,
        special=chat.special if chat else model_specials(None if run is None else run.data, snapshot),
        template_origin=chat.origin if chat else None,
        turn_stop=chat.end.stop if chat else (),
        special_tokens=run is not None and run.data.special_tokens,
        step=step,
    )


def fsdp_mesh(job: schema.Job) -> Mesh:
    """Return a mesh of the job's devices on this machine, all of them along fsdp."""
    chosen = choose(job.device, job.devices)
    return make_mesh(resolve(1, -1, 1, len(chosen.devices)), chosen.devices)


def abstract_plain_params(model: Model, mesh: Mesh, dtype: str) -> Any:
    """Return the shapes and shardings of the model's parameters in `dtype`."""

    def placed(s: spec.ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype), sharding=stored(mesh, s.shape, s.axes))

    return spec.map_specs(placed, model.specs())


def pretrained_params(facts: ModelFacts, wanted: Any) -> Any:
    """Read the weights of a checkpoint from its files to the devices. Downloads them if necessary.

    Args:
      facts: the facts about a model with a checkpoint.
      wanted: shapes, dtypes and shardings.

    Raises:
      UserError: the checkpoint records quantization scales that do not match its weights.
    """
    checkpoint = facts.downloaded_checkpoint
    with weights_of(checkpoint) as (weights, scales):
        model = model_for(checkpoint.config)
        params = read_params(weights, checkpoint.family.table, model, wanted, scales)
    if checkpoint.recorded is not None and not are_multiples(params):
        raise UserError(
            "E-RUN-032",
            f"the scales in {checkpoint.snapshot.folder / RECORD} do not match the weights",
            why="some weights are not an integer times their scale: they were changed after the export",
            fix=f"remove the folder {checkpoint.snapshot.folder / RECORD}; the weights are then rounded again",
        )
    return params


def run_params(folder: RunFolder, step: int, resolved: ResolvedJob, mesh: Mesh, dtype: str) -> Any:
    """Return the weights of a run at a step, in the form of the plain model and in `dtype`.

    Adapters are merged into the weights. If the run has a moving average of the weights, it is used.
    """
    params = method_params(folder, step, resolved, mesh)
    plain = spec.map_specs(lambda s: stored(mesh, s.shape, s.axes), model_specs(resolved))

    def finished(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), lowrank.plain(params, dtype))

    if resolved.job.precision.params == dtype and same_structure(params, plain):
        return params
    with jax.set_mesh(mesh):
        return jax.jit(finished, out_shardings=plain)(params)


def same_structure(one: Any, other: Any) -> bool:
    return bool(jax.tree.structure(one) == jax.tree.structure(other))  # type: ignore[operator]


def method_params(folder: RunFolder, step: int, resolved: ResolvedJob, mesh: Mesh) -> Any:
    """Return the weights of a run's model at a step, with the leaf types of its method, such as adapters.

    Weights that the checkpoint does not contain are read from the model's files.
    """
    resolved = resolved.with_values(objective=None)  # a custom objective adds no weights, so its code is not needed
    method, before = method_of(resolved, chunk=1), model_specs(resolved)
    params = saved_params(folder, step, resolved, mesh)
    specs = method.objective.own(run_specs(resolved))
    if same_structure(params, abstract_params(specs, mesh)):
        return params
    saved, reads = spec.map_specs(lambda s: s.saved, specs), method.reads(before)
    facts = resolved.model_facts
    given = {MODEL: pretrained_params(facts, abstract_params(reads, mesh))} if facts.is_checkpoint else {}

    def rest(given: dict[str, Any], key: jax.Array) -> Any:
        own = given[MODEL] if given else method.fresh(before, key)
        return spec.split(method.dressed(before, own, given, key), saved)[1]

    with jax.set_mesh(mesh):
        return spec.merge(params, jax.jit(rest)(given, jax.random.key(resolved.job.seed)))


def saved_params(folder: RunFolder, step: int, resolved: ResolvedJob, mesh: Mesh) -> Any:
    """Return the weights of a run's model in the checkpoint of a step, with None for weights that are not saved.

    If the run has a moving average of the weights, it replaces them.
    """
    job, specs = resolved.job, run_specs(resolved)
    reader = Reader(folder.checkpoints(job))
    like = abstract_params(specs, mesh)
    params = reader.restore(step, spec.split(like, spec.map_specs(lambda s: s.saved, specs))[0], part="params")
    if job.optimizer.ema is not None:
        learning = spec.split(like, spec.map_specs(lambda s: s.trainable, specs))[0]
        params = spec.merge(reader.restore(step, learning, part="average"), params)
    return method_of(resolved, chunk=1).objective.own(params)


def _ends(snapshot: Snapshot | None) -> set[int]:
    """Return the ids that end a text, from generation_config.json and config.json."""
    found: set[int] = set()
    for content in (snapshot.json("generation_config.json"), snapshot.json("config.json")) if snapshot else ():
        for part in (content or {}, text_of(content or {})):  # a multimodal model has them in either place
            ids = part.get("eos_token_id")
            found |= {one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)}
    return found
