"""A file with stages, trained at tiny size: integers carry over bit for bit, and the last stage loads elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import assert_error
from safetensors.numpy import load_file

from forerun.cli.main import main
from forerun.config.stages import Stage, stages_of
from forerun.errors import UserError
from forerun.models import model_facts
from forerun.nn.weights import lowrank
from forerun.nn.weights.dense import is_weight
from forerun.nn.weights.fakequant import FakeQuantized
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.run_folder import RunFolder, folder_of, require_run
from forerun.trained_model.load_model import fsdp_mesh, method_params
from forerun.verbs.stage_result import _outline, planning_job
from forerun.weights_io.packed import unpack

Codes = dict[str, tuple[np.ndarray, np.ndarray]]
JOB = """\
model: {layers: 1, embed: 32, heads: 2, mlp: 64}
data: {path: tale.txt}
sequence: 16
batch: 8
device: cpu
devices: 1
optimizer: {lr: 1e-2}
precision: {compute: float32}
remat: none
checkpoint: {every: 2}
sample: {tokens: 0}
lora: null
stages:
"""
INT4 = """\
  qat: {qat: {weights: int4, group: 16}, steps: 4}
  recovery: {lora: {rank: 2, alpha: 4}, steps: 3}
  more: {lora: {rank: 2, alpha: 4}, steps: 2}
  dpo: {preferences: dpo, data: {path: pairs.jsonl, chat_template: chatml}, steps: 2, sequence: 64, batch: 4}
"""
INT8 = """\
  qat: {qat: {weights: int8, group: null, scales: learned}, steps: 3}
  recovery: {lora: {rank: 2, alpha: 4}, steps: 2}
"""


def written(folder: Path, stages: str) -> Path:
    (folder / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    pairs = [{"prompt": f"q{n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(16)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "tiny.yaml").write_text(JOB + stages)
    return folder / "tiny.yaml"


def forerun(*words: str) -> None:
    assert main(list(words)) == 0, words


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Stage, ...]]:
    """The stages of a file, after all of them were trained. Each file is trained once."""

    @cache
    def made(stages: str) -> tuple[Stage, ...]:
        folder = tmp_path_factory.mktemp("chain")
        file = written(folder, stages)
        forerun("train", str(file), f"runs={folder / 'runs'}")
        return stages_of(file, [f"runs={folder / 'runs'}"])

    return made


@pytest.fixture(params=[INT4, INT8], ids=["int4", "int8"])
def chain(request: pytest.FixtureRequest, trained: Callable[[str], tuple[Stage, ...]]) -> tuple[Stage, ...]:
    return trained(request.param)


@pytest.fixture
def four(trained: Callable[[str], tuple[Stage, ...]]) -> tuple[Stage, ...]:
    return trained(INT4)


def params_of(stage: Stage) -> Any:
    """The weights of a stage's last checkpoint, with the leaf types of its method."""
    run = folder_of(stage.job)
    job = require_run(run)
    assert job.steps is not None
    model_facts._pretrained.cache_clear()
    return method_params(run, job.steps, ResolvedJob(job), fsdp_mesh(job))


def codes_of(stage: Stage) -> Codes:
    params = params_of(stage)

    def found(params: Any) -> Any:
        flat = jax.tree_util.tree_leaves_with_path(lowrank.bare(params), is_leaf=is_weight)
        return {jax.tree_util.keystr(path): one.codes() for path, one in flat if isinstance(one, FakeQuantized)}

    with jax.set_mesh(fsdp_mesh(stage.job)):
        made = jax.jit(found)(params)
    return {path: (np.asarray(codes), np.asarray(scales)) for path, (codes, scales) in made.items()}


def test_codes_and_scales_carry_over_bit_for_bit(chain: tuple[Stage, ...]) -> None:
    """Those of the trained stage, of its folder by the file, and of every stage on the same base after its training."""
    first, *others = [stage for stage in chain if stage.job.qat is not None]
    expected = codes_of(first)
    is_int4 = first.job.qat is not None and first.job.qat.weights == "int4"
    sizes = [sum(one[kind].size for one in expected.values()) for kind in (0, 1)]
    assert (len(expected), sizes) == (7, [10_240, 640 if is_int4 else 288]), "as docs/how-to/stages.md has them"
    for stage in others:
        got = codes_of(stage)
        assert got.keys() == expected.keys()
        different = {
            path: (int((got[path][0] != codes).sum()), int((got[path][1].view("u2") != scales.view("u2")).sum()))
            for path, (codes, scales) in expected.items()
        }
        assert set(different.values()) == {(0, 0)}, different
    tensors = load_file(folder_of(first.job).path / "model/model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    codes, scales = expected[".blocks.down"]
    np.testing.assert_array_equal(codes[0].T, unpack(tensors[f"{name}.weight_packed"], 4 if is_int4 else 8, 64))
    assert scales[0].T.tobytes() == tensors[f"{name}.weight_scale"].tobytes()


def test_other_weights_carry_over_in_their_own_dtype(chain: tuple[Stage, ...]) -> None:
    first, second = params_of(chain[0]), params_of(chain[1])
    stored = load_file(folder_of(chain[0].job).path / "model/model.safetensors")["model.embed_tokens.weight"]
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, np.asarray(first.embed))
    # The base under adapters is in bfloat16, as `lora.base` says.
    np.testing.assert_array_equal(np.asarray(second.embed), np.asarray(first.embed.astype("bfloat16")))


def test_adapters_continue_where_the_stage_before_ended(four: tuple[Stage, ...]) -> None:
    _, recovery, more, _ = four
    assert more.start == "adapter"
    tensors = load_file(folder_of(recovery.job).path / "adapter/adapter_model.safetensors")
    down = params_of(recovery).blocks.down
    name = "base_model.model.model.layers.0.mlp.down_proj"
    np.testing.assert_array_equal(tensors[f"{name}.lora_A.weight"], np.asarray(down.down[0]).T)
    np.testing.assert_array_equal(tensors[f"{name}.lora_B.weight"], np.asarray(down.up[0]).T)
    first = json.loads((folder_of(more.job).path / "metrics.jsonl").read_text().splitlines()[0])
    last = json.loads((folder_of(recovery.job).path / "metrics.jsonl").read_text().splitlines()[-1])
    assert abs(first["loss"] - last["loss"]) < 0.5


def test_the_merged_model_is_the_integers_and_the_adapters(four: tuple[Stage, ...]) -> None:
    """By a NumPy formula: code x scale + alpha / rank x B A, in float32."""
    _, _, more, dpo = four
    assert dpo.start == "model"
    codes, scales = codes_of(more)[".blocks.down"]
    base = codes[0].astype(np.float32).reshape(4, 16, 32) * scales[0].astype(np.float32)[:, None, :]
    weight = params_of(more).blocks.down
    delta = np.asarray(weight.down[0], np.float32) @ np.asarray(weight.up[0], np.float32) * 2
    merged = load_file(folder_of(more.job).path / "model/model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert merged.dtype == np.float32
    np.testing.assert_allclose(merged.T, base.reshape(64, 32) + delta, rtol=0, atol=1e-6)
    assert np.abs(delta).max() > 1e-4


def test_a_finished_file_is_not_trained_again(chain: tuple[Stage, ...], capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in Path(chain[0].job.runs).rglob("*") if file.is_file()}
    forerun("train", str(chain[0].loaded.path), f"runs={chain[0].job.runs}")
    after = {file: file.stat().st_mtime_ns for file in Path(chain[0].job.runs).rglob("*") if file.is_file()}
    assert {file for file in before if before[file] != after.get(file)} == set()
    assert capsys.readouterr().out.count("this run has finished") == len(chain)


def test_a_changed_finished_stage_is_an_error(four: tuple[Stage, ...], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(four[0].loaded.path), f"runs={four[0].job.runs}"]
    assert main([*words, "stages.qat.steps=6"]) == 2
    assert "[E-RUN-060]" in capsys.readouterr().err
    assert main([*words, "stages.qat.optimizer.lr=1e-3"]) == 2
    assert "[E-RUN-027]" in capsys.readouterr().err


def test_a_lost_result_is_written_again_bit_for_bit(four: tuple[Stage, ...]) -> None:
    """Of a stage that is needed again: more steps of the second one are not possible, so of the last."""
    folder = folder_of(four[2].job).path / "model"
    before = {name: tensor.tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").write_bytes(b"a disk that was full")
    (folder.parent / "model-result.json").unlink()
    forerun("train", str(four[0].loaded.path), f"runs={four[0].job.runs}", "stages.dpo.steps=3")
    after = {name: tensor.tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}
    assert after == before
    assert require_run(folder_of(four[3].job)).steps == 3


def test_an_unfinished_stage_has_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, INT8)
    assert main(["train", str(file), f"runs={tmp_path / 'runs'}", "--stage", "recovery"]) == 2
    assert "[E-RUN-061]" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "runs/tiny"), "--to", str(tmp_path / "out")]) == 2
    assert "[E-RUN-063]" in capsys.readouterr().err
    assert main(["train", str(file), "--host", "0/2", "--leader", "there"]) == 2
    assert "[E-COMMAND-040]" in capsys.readouterr().err


def test_the_outline_is_what_the_stage_writes(chain: tuple[Stage, ...]) -> None:
    """`plan` and `check` read the outline before the stage is trained. The real folder is the oracle."""
    for stage in chain[1:]:
        writer = stage.model_writer
        assert writer is not None
        real, outline = Path(str(stage.job.model.name)), _outline(writer)
        assert json.loads((outline / "config.json").read_text()) == json.loads((real / "config.json").read_text())
        assert (outline / "tokenizer.json").read_bytes() == (real / "tokenizer.json").read_bytes()
        assert not list(outline.glob("*.safetensors"))
        assert planning_job(stage) == stage.job, "the real folder exists"


def test_all_stages_are_checked_before_the_first_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, INT4)
    runs = tmp_path / "runs"
    forerun("check", str(file), f"runs={runs}")
    text = capsys.readouterr().out
    assert text.count("\nstage ") == 3
    assert str(runs / "tiny-more/model") in text
    assert ".cache" not in text
    forerun("check", str(file), f"runs={runs}", "--stage", "dpo")
    assert "stage qat" not in capsys.readouterr().out
    assert not runs.exists()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_exports_give_the_same_greedy_tokens_elsewhere(four: tuple[Stage, ...], tmp_path: Path) -> None:
    """The last stage in transformers, and the recovery stage in PEFT on the integers of stage qat."""
    import peft
    import torch
    import transformers

    import forerun as fr

    runs, prompt = Path(four[0].job.runs), "It was the best"
    forerun("export", str(runs / "tiny"), "--to", str(tmp_path / "dpo"))
    forerun("export", str(runs / "tiny"), "--stage", "recovery", "--to", str(tmp_path / "recovery"))
    packed, first = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "recovery", runs / "tiny-qat/model")
    )
    integers = [name for name in first if name.endswith(("weight_packed", "weight_scale"))]
    assert [name for name in integers if packed[name].tobytes() != first[name].tobytes()] == []

    def loaded(folder: Path, **options: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)

    unpacked = transformers.CompressedTensorsConfig(dequantize=True)
    base = loaded(tmp_path / "recovery", quantization_config=unpacked)
    models = {
        runs / "tiny": loaded(tmp_path / "dpo"),
        runs / "tiny-recovery": peft.PeftModel.from_pretrained(base, str(tmp_path / "recovery/adapter")),
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "dpo")
    for source, model in models.items():
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        theirs = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        ours = fr.load_model(source, device="cpu", devices=1, dtype="float32").generate(
            prompt, max_tokens=12, temperature=0
        )
        assert str(ours) == tokenizer.decode(theirs, skip_special_tokens=True), source


def test_the_python_api_has_the_same_jobs(four: tuple[Stage, ...]) -> None:
    import forerun as fr

    stages = fr.load_stages(four[0].loaded.path, f"runs={four[0].job.runs}")
    assert list(stages) == ["qat", "recovery", "more", "dpo"]
    assert [stages[name] for name in stages] == [stage.job for stage in four]
    assert fr.open_run(Path(four[0].job.runs) / "tiny").folder == folder_of(four[3].job).path
    assert RunFolder(folder_of(four[3].job).path).summary.is_file()
    with pytest.raises(UserError) as raised:
        fr.load_job(four[0].loaded.path)
    assert_error(raised.value, "E-JOB-110")
