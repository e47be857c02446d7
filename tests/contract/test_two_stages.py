"""A second stage of training begins with the integers of the first: every code, every scale, every logit.

The first stage is written as `export` writes it; what must come back is compared with the codes and scales that the
first stage computes with, and with those in the file.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recording_reporter import RecordingReporter
from safetensors.numpy import load_file, save_file

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.devices import choose
from forerun.methods.method import MODEL, method_of
from forerun.methods.qat import rounding_messages
from forerun.models import model_facts
from forerun.models.families.registry import family_for
from forerun.models.model_facts import ModelFacts, config_of, model_of
from forerun.models.quantization_config import QUANTIZATION, RECORD
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.weights import lowrank
from forerun.nn.weights.dense import is_weight
from forerun.nn.weights.fakequant import FakeQuantized
from forerun.program.state import abstract_params
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.run_devices import program_on
from forerun.trained_model.base_weights import read_file_weights
from forerun.trained_model.load_model import fsdp_mesh, pretrained_params
from forerun.weights_io import documents
from forerun.weights_io.packed import unpack, write_packed, write_scales
from forerun.weights_io.write import write_params

Codes = dict[str, tuple[np.ndarray, np.ndarray]]
LLAMA = {"layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 48, "tied": False, "vocab": 64}
QWEN2 = LLAMA | {"qkv_bias": True, "tied": True}  # a bias beside a matrix of integers
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1,
        "n_head": 4, "n_positions": 16, "n_inner": 48,
        "activation_function": "gelu_new"}  # fmt: skip
LORA = {"rank": 2, "alpha": 2}
SOME = ["o_proj", "down_proj"]
FORMS = {"packed": "F32", "dense": "F32", "dense, bfloat16": "BF16"}
KINDS: dict[str, dict[str, Any]] = {
    "int4 in groups": {"weights": "int4", "group": 16},
    "int4 by channel": {"weights": "int4", "group": None, "targets": SOME},
    "int8 in groups": {"weights": "int8", "group": 8, "targets": SOME},
    "int8 by channel, with activations": {"weights": "int8", "group": None, "activations": "int8", "targets": SOME},
    "int4, learned": {"weights": "int4", "group": 16, "scales": "learned", "targets": SOME},
}


def job_of(model: Any, **sections: Any) -> Job:
    given = {"name": "two", "data": "unread", "steps": 1, "device": "cpu", "devices": 1, "model": model}
    return Job.model_validate(given | sections)


def first_stage(job: Job) -> tuple[Any, Codes]:
    """Weights as a run with `qat` holds them, and their integers. Learned scales are off by up to a third."""
    model, method = model_of(job.model), method_of(ResolvedJob(job), chunk=1)

    def moved(weight: Any) -> Any:
        if not isinstance(weight, FakeQuantized) or weight.log_scale is None:
            return weight
        shape = weight.log_scale.shape
        shift = jax.random.uniform(jax.random.key(math.prod(shape)), shape, jnp.float32, -0.3, 0.3)
        return replace(weight, log_scale=weight.log_scale + shift)

    def made(key: jax.Array) -> Any:
        params = method.dressed(model.specs(), spec.initial(model.specs(), key), {}, key)
        params = jax.tree.map(moved, params, is_leaf=is_weight)
        return params, codes_of(params)

    return as_numpy(jax.jit(made)(jax.random.key(1)))


def written(folder: Path, job: Job, params: Any, *, dense: bool, dtype: str = "F32") -> Path:
    """What `export` writes of them, without a run."""
    config = config_of(job.model)
    family, model = family_for(config), model_of(job.model)
    base = GPT2 if family.write is None else None
    folder.mkdir()
    section: dict[str, Any] = {}
    if dense:
        write_params(folder, lowrank.plain(params, "float32"), family.table, model, dtype)
        write_scales(folder, params, family, model)
    else:
        section = {QUANTIZATION: write_packed(folder, params, family, model, dtype)}
    documents.write_json(folder / "config.json", documents.config_json(family, config, base, dtype, 0) | section)
    model_facts._pretrained.cache_clear()
    return folder


def begun(job: Job) -> tuple[Any, Codes]:
    """The model's weights at step 0 of a run, and their integers."""
    model, mesh, method = model_of(job.model), fsdp_mesh(job), method_of(ResolvedJob(job), chunk=1)
    before = spec.cast(model.specs(), jnp.dtype(job.precision.params))
    given = {MODEL: pretrained_params(ModelFacts(job.model), abstract_params(method.reads(before), mesh))}

    def made(given: Any, key: jax.Array) -> Any:
        params = method.dressed(before, given[MODEL], given, key)
        return params, codes_of(params)

    with jax.set_mesh(mesh):
        return as_numpy(jax.jit(made)(given, jax.random.key(0)))


def codes_of(params: Any) -> Any:
    flat = jax.tree_util.tree_leaves_with_path(lowrank.bare(params), is_leaf=is_weight)
    return {jax.tree_util.keystr(path): one.codes() for path, one in flat if isinstance(one, FakeQuantized)}


def as_numpy(made: tuple[Any, Any]) -> tuple[Any, Codes]:
    return made[0], {path: (np.asarray(codes), np.asarray(scales)) for path, (codes, scales) in made[1].items()}


def assert_same(got: Codes, expected: Codes) -> None:
    assert got.keys() == expected.keys()
    for path, (codes, scales) in expected.items():
        np.testing.assert_array_equal(got[path][0], codes, err_msg=path)
        assert got[path][1].tobytes() == scales.tobytes(), f"scales of {path}"


def logits(job: Job, params: Any) -> np.ndarray:
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12) % 60
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape)
    model = model_of(job.model)

    def computed(params: Any) -> jax.Array:
        return model.apply(params, tokens, np.ones_like(tokens), positions, Compute()).logits()

    with jax.set_mesh(fsdp_mesh(job)):
        return np.asarray(jax.jit(computed)(params))


CASES = [
    ("int4 in groups", "packed"),
    ("int4 by channel", "dense"),
    ("int8 in groups", "dense, bfloat16"),
    ("int8 by channel, with activations", "packed"),
    ("int4, learned", "packed"),
]


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_the_second_stage_begins_with_the_integers_of_the_first(kind: str, form: str, tmp_path: Path) -> None:
    """Under adapters, on a base that rests in bfloat16; and with all weights learning."""
    first = job_of(LLAMA, qat=KINDS[kind])
    params, expected = first_stage(first)
    folder = written(tmp_path / "first", first, params, dense=form != "packed", dtype=FORMS[form])
    computed = {key: value for key, value in KINDS[kind].items() if key != "scales"}
    under = job_of(str(folder), qat=computed, lora=LORA)
    assert_same(begun(under)[1], expected)
    assert_same(begun(job_of(str(folder), qat=KINDS[kind]))[1], expected)
    assert [is_warning for _, is_warning in rounding_messages(ResolvedJob(under))] == [False]


def test_integers_that_computed_scales_cannot_keep_are_told(tmp_path: Path) -> None:
    """Learned scales leave groups without a code at the end of the range. On eight devices."""
    computed = {key: value for key, value in KINDS["int4, learned"].items() if key != "scales"}
    for kind, lines in ((KINDS["int4, learned"], 1), (computed, 0)):
        first = job_of(LLAMA, qat=kind)
        folder = written(tmp_path / f"{lines}", first, first_stage(first)[0], dense=True)
        told: list[str] = []
        job = job_of({"name": str(folder)}, qat=computed, devices=8, batch=8, remat="none")
        read_file_weights(
            ResolvedJob(job), program_on(ResolvedJob(job), choose("cpu", 8), 8), reporter=RecordingReporter(told)
        )
        assert len(told) == lines


def test_the_second_stage_computes_what_the_first_did(tmp_path: Path) -> None:
    first = job_of(LLAMA, qat=KINDS["int4 in groups"])
    params, _ = first_stage(first)
    expected = logits(first, params)
    for dense in (False, True):
        folder = written(tmp_path / f"dense {dense}", first, params, dense=dense)
        for more in ({"lora": LORA | {"base": "float32"}}, {}):
            job = job_of(str(folder), qat=KINDS["int4 in groups"], **more)
            np.testing.assert_array_equal(logits(job, begun(job)[0]), expected)


def test_the_codes_in_the_packed_file_are_the_bases_own(tmp_path: Path) -> None:
    """By the file, not by our reader: rows are outputs, and a row's codes are in the order of its inputs."""
    first = job_of(LLAMA, qat=KINDS["int4 in groups"])
    folder = written(tmp_path / "first", first, first_stage(first)[0], dense=False)
    tensors = load_file(folder / "model.safetensors")
    _, got = begun(job_of(str(folder), qat=KINDS["int4 in groups"], lora=LORA))
    codes, scales = got[".blocks.down"]
    name = "model.layers.1.mlp.down_proj"
    np.testing.assert_array_equal(codes[1].T, unpack(tensors[f"{name}.weight_packed"], 4, 48))
    np.testing.assert_array_equal(scales[1].T, tensors[f"{name}.weight_scale"])


def test_other_settings_round_again_and_are_told(tmp_path: Path) -> None:
    first = job_of(LLAMA, qat=KINDS["int4 in groups"])
    params, _ = first_stage(first)
    folder = written(tmp_path / "first", first, params, dense=False)
    for sections in ({"qat": {"weights": "int8", "group": 16}}, {"qat": {"weights": "int4", "group": 8}},
                     {"lora": LORA | {"base": "int4", "block": 16}}, {}):  # fmt: skip
        resolved = ResolvedJob(job_of(str(folder), **sections))
        assert [is_warning for _, is_warning in rounding_messages(resolved)] == [True]
    eight, _ = begun(job_of(str(folder), qat={"weights": "int8", "group": 16}))
    plain = lowrank.plain(params, "float32")
    np.testing.assert_allclose(
        lowrank.plain(eight, "float32").blocks.up.value, plain.blocks.up.value, atol=1e-3, rtol=0.05
    )


def test_weights_that_were_changed_after_the_export_are_not_taken_for_integers(tmp_path: Path) -> None:
    first = job_of(LLAMA, qat=KINDS["int4 in groups"])
    folder = written(tmp_path / "first", first, first_stage(first)[0], dense=True)
    tensors = load_file(folder / "model.safetensors")
    changed = tensors["model.layers.0.mlp.up_proj.weight"].copy()
    changed[3, 5] *= 1.01
    save_file(tensors | {"model.layers.0.mlp.up_proj.weight": changed}, folder / "model.safetensors")
    job = job_of(str(folder), qat=KINDS["int4 in groups"], lora=LORA)
    with pytest.raises(UserError) as refused:
        begun(job)
    assert RECORD in str(refused.value.fix)
    for file in (folder / RECORD).iterdir():
        file.unlink()
    (folder / RECORD).rmdir()
    model_facts._pretrained.cache_clear()
    begun(job)


def test_a_family_without_integers_keeps_them_in_a_dense_folder(tmp_path: Path) -> None:
    """GPT-2 has its matrices the other way round, three of them side by side in one tensor."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(GPT2))
    first = job_of(str(tmp_path / "base"), qat={"weights": "int4", "group": 16, "targets": ["c_attn", "c_fc"]})
    params, expected = first_stage(first)
    assert len(expected) == 4
    folder = written(tmp_path / "first", first, params, dense=True)
    assert_same(begun(job_of(str(folder), qat=first.qat, lora=LORA))[1], expected)


def test_a_bias_beside_integers_is_read(tmp_path: Path) -> None:
    first = job_of(QWEN2, qat=KINDS["int4 in groups"])
    params, expected = first_stage(first)
    folder = written(tmp_path / "first", first, params, dense=False)
    assert_same(begun(job_of(str(folder), qat=first.qat, lora=LORA))[1], expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight_shape", lambda x: np.array([10**9, 48])),
        ("weight_shape", lambda x: np.array([-32, -48])),
        ("weight_shape", lambda x: x.astype(np.int32)),
        ("weight_packed", lambda x: x[:, :-1]),
        ("weight_packed", lambda x: x.astype(np.float32)),
        ("weight_packed", lambda x: None),
        ("weight_scale", lambda x: x[:, :2]),
        ("weight_scale", lambda x: x[:, 0]),
        ("weight_scale", lambda x: x[:, :0]),
        ("weight_scale", lambda x: x.astype(np.int32)),
        ("weight_scale", lambda x: x * np.float32(1.001)),
    ],
)
def test_integers_that_do_not_fit_are_rejected(name: str, change: Any, integers: Path, tmp_path: Path) -> None:
    """A folder may come from anywhere: wrong shapes and dtypes, missing tensors, scales that are not bfloat16."""
    shutil.copytree(integers, tmp_path / "bad")
    tensors = load_file(integers / "model.safetensors")
    whole = f"model.layers.1.mlp.down_proj.{name}"
    tensors[whole] = change(tensors[whole].astype(np.float32) if name == "weight_scale" else tensors[whole])
    kept = {key: np.ascontiguousarray(tensor) for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "bad/model.safetensors")
    with pytest.raises(UserError):
        begun(job_of(str(tmp_path / "bad"), qat=KINDS["int4 in groups"], lora=LORA))


@pytest.fixture(scope="module")
def integers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    first = job_of(LLAMA, qat=KINDS["int4 in groups"])
    return written(tmp_path_factory.mktemp("packed") / "first", first, first_stage(first)[0], dense=False)


@pytest.mark.parametrize("change", [("quant_method", "gptq"), ("format", "marlin-24"), ("ignore", ["re:.*"])])
def test_integers_of_another_form_are_rejected(change: tuple[str, Any], tmp_path: Path) -> None:
    first = job_of(LLAMA, qat=KINDS["int4 in groups"])
    folder = written(tmp_path / "first", first, first_stage(first)[0], dense=False)
    config = json.loads((folder / "config.json").read_text())
    config[QUANTIZATION][change[0]] = change[1]
    (folder / "config.json").write_text(json.dumps(config))
    model_facts._pretrained.cache_clear()
    with pytest.raises(UserError):
        config_of(job_of(str(folder)).model)
