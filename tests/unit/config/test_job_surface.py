"""The keys of a job are a promise: a new or a lost one is a conscious change of this list, and of the pages.

`UPDATE_DOCS=1 pytest tests/unit/config/test_job_surface.py` writes the tables of docs/reference/job.md and models.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from error_assertions import raises_error
from pydantic.fields import FieldInfo

from forerun.config import keys
from forerun.config.load import load
from forerun.config.schema import RESIDUALS
from forerun.config.source import flow
from forerun.errors import UserError

DOCS = Path(__file__).resolve().parents[3] / "docs"
KEYS = """
name seed device devices sequence batch micro_batch steps epochs attention compiler_options loss_chunk log_every runs
model.name model.layers model.embed model.heads model.kv_heads model.head_dim model.mlp model.vocab model.tied
model.qkv_bias model.qk_norm model.window model.rope_theta model.norm_eps model.options
model.new_tokens model.new_special_tokens model.first_new_token
model.revision model.rope_scaling.factor model.rope_scaling.low model.rope_scaling.high model.rope_scaling.original
data.path data.mixture data.tokenizer data.columns data.packing data.too_long data.loss_on data.chat_template
data.apply_template data.separator data.shuffle data.validation_by data.system data.limit data.prefetch
data.thinking data.ignored_fields
data.special_tokens data.validation data.bad_rows data.bad_files data.store data.workers data.feeders data.ledger
data.cache_gib
optimizer.lr optimizer.schedule optimizer.warmup optimizer.final_lr optimizer.weight_decay optimizer.b1 optimizer.b2
optimizer.eps optimizer.clip optimizer.ema optimizer.name optimizer.decay optimizer.power optimizer.cycles
optimizer.muon.momentum optimizer.muon.scale optimizer.options optimizer.groups
mesh.data mesh.fsdp mesh.tp mesh.slices mesh.dcn_dtype mesh.context mesh.expert
mesh.min_slices mesh.slice_wait_seconds
remat.policy remat.keep remat.offload
precision.params precision.compute precision.matmul
experts.balance_loss experts.z_loss
preferences.loss preferences.beta preferences.smoothing preferences.reference
objective.name objective.options
lora.rank lora.alpha lora.targets lora.dropout lora.rslora lora.dora lora.base lora.block lora.start
qat.weights qat.group qat.activations qat.scales qat.targets
distil.teacher distil.revision distil.cache distil.top_k distil.temperature distil.soft distil.anchor
distil.anchor_share
guard.spike guard.window guard.skips guard.in_a_row guard.compare_every
validation.every unroll validation.batches validation.patience
checkpoint.every checkpoint.folder checkpoint.keep checkpoint.keep_every checkpoint.keep_best
sample.prompt sample.tokens sample.temperature sample.every sample.prompts
track.to track.url track.experiment track.project track.entity
"""


def test_the_keys_of_a_job_are_frozen() -> None:
    assert sorted(keys.leaf_keys()) == sorted(KEYS.split())


def test_the_shorthands_are_frozen() -> None:
    assert keys.shorthands() == {
        "model": "name",
        "data": "path",
        "remat": "policy",
        "track": "to",
        "preferences": "loss",
        "objective": "name",
        "distil": "teacher",
    }


@pytest.fixture
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("model: qwen3-0.6b\ndata: texts\n")


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("name", ["../elsewhere", ".hidden", "a/b", "a b", "a\nb", "Bücher", "''"])
def test_a_name_that_is_no_safe_folder_is_refused(name: str) -> None:
    with raises_error("E-JOB-046") as caught:
        load("job.yaml", [f'name="{name}"' if name != "''" else "name=''"])
    assert caught.value.why == "command line sets name"


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("name", ["a", "run-2.1_b", "-1e", "8B"])
def test_a_safe_name_is_kept(name: str) -> None:
    assert load("job.yaml", [f"name='{name}'"]).job.name == name


@pytest.mark.usefixtures("_in_a_folder")
def test_the_name_comes_from_the_file_and_of_job_yaml_from_its_folder() -> None:
    assert load("job.yaml").job.name == Path.cwd().name
    file = Path("job.yaml").rename("my job.yaml")
    assert load(file).job.name == "my-job"
    assert load(file, ["name=mine"]).job.name == "mine"


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("axis", ["data", "fsdp", "tp"])
def test_a_mesh_axis_is_a_number_of_devices_or_the_rest(axis: str) -> None:
    for size in (0, -2):
        with pytest.raises(UserError, match=f"mesh.{axis}: {size} is not a number of devices"):
            load("job.yaml", [f"mesh.{axis}={size}"])
    for size in (-1, 1, 8):
        assert getattr(load("job.yaml", [f"mesh.{axis}={size}"]).job.mesh, axis) == size


@pytest.mark.usefixtures("_in_a_folder")
def test_clipping_at_nothing_is_refused_and_null_is_none() -> None:
    for limit in ("0", "-1"):
        with raises_error("E-JOB-020", "0"):
            load("job.yaml", [f"optimizer.clip={limit}"])
    assert load("job.yaml", ["optimizer.clip=null"]).job.optimizer.clip is None


def test_the_job_page_has_every_key() -> None:
    require_shown("reference/job.md", "keys", "\n\n".join(key_tables()))


def test_the_models_page_has_every_size() -> None:
    require_shown("reference/models.md", "sizes", sizes_table())


def test_the_models_page_has_every_residual() -> None:
    page = (DOCS / "reference/models.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| \[B", page, re.MULTILINE) == list(RESIDUALS)


@pytest.mark.usefixtures("_in_a_folder")
def test_the_jobs_of_the_job_page_load() -> None:
    jobs = re.findall(r"```yaml title=\"job.yaml\"\n(.*?)```", (DOCS / "reference/job.md").read_text(), re.DOTALL)
    assert len(jobs) == 2
    for text in jobs:
        assert len(text.splitlines()) <= 15
        Path("job.yaml").write_text(text)
        load("job.yaml")


@pytest.mark.usefixtures("_in_a_folder")
def test_the_errors_of_the_job_page_are_what_is_printed() -> None:
    page = (DOCS / "reference/job.md").read_text()
    shown = re.findall(r"```console\n\$ forerun check job.yaml (.*?)\n(error: .*?)```", page, re.DOTALL)
    assert len(shown) == 4
    for words, text in shown:
        with pytest.raises(UserError) as caught:
            load("job.yaml", words.split())
        assert f"{caught.value}\n" == text


def require_shown(name: str, part: str, wanted: str) -> None:
    """What stands between the marks of a page is what the code says."""
    path = DOCS / name
    begin, end = f"<!-- {part}: written by tests/unit/config/test_job_surface.py -->\n", f"<!-- end of {part} -->"
    before, rest = path.read_text().split(begin)
    found, after = rest.split(end)
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(f"{before}{begin}\n{wanted}\n\n{end}{after}")
    else:
        assert found.strip() == wanted, f"docs/{name} differs: UPDATE_DOCS=1 pytest {Path(__file__).name}"


def key_tables() -> list[str]:
    sections: dict[str, list[str]] = {}
    for key in keys.leaf_keys():
        section, _, _ = key.rpartition(".")
        cells = (f"`{key}`", shown_default(keys.fields()[key]), shown_meaning(key), keys.reason(key))
        sections.setdefault(section, []).append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    head = "| key | default | what it is | why this default |\n| --- | --- | --- | --- |\n"
    return [f"### {section or 'the job itself'}\n\n{head}" + "\n".join(rows) for section, rows in sections.items()]


def shown_default(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{flow(field.get_default(call_default_factory=True))}`"


def shown_meaning(key: str) -> str:
    """The description, and the choices where it does not name them all."""
    meaning, choices = keys.meaning(key), _choices(keys.fields()[key].annotation)
    return meaning if all(choice in meaning for choice in choices) else f"{meaning}: {', '.join(choices)}"


def _choices(kind: Any) -> list[str]:
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []


def sizes_table() -> str:
    from forerun.models.decoder import Decoder
    from forerun.models.sizes import SIZES
    from forerun.nn.spec import count
    from forerun.units import Count

    lines = [
        "| name | parameters | layers | embed | heads | kv heads | head | mlp | vocab | tied | also |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for name, size in SIZES.items():
        also = [
            "QKV bias" if size.qkv_bias else "",
            "QK norm" if size.qk_norm else "",
            "sinks" if size.attention_sinks else "",
            f"window {size.window}" if size.window else "",
            "gated delta rule in 3 of 4 layers" if size.attention_gate else "",
            "window 128 in every other layer" if size.attention_sinks else "",
            f"RoPE scaling {size.rope_scaling.factor:g}" if size.rope_scaling else "",
            f"{size.experts.count} experts, {size.experts.top} per token" if size.experts else "",
            "a shared expert" if size.experts and size.experts.shared else "",
            "experts beside an MLP" if size.experts and size.experts.beside else "",
        ]
        mlp = size.experts.mlp if size.experts else size.mlp
        cells = (
            f"`{name}`",
            Count(count(Decoder(size).specs())),
            *(size.layers, size.embed, size.heads, size.kv_heads, size.head_dim, mlp, size.vocab),
            "yes" if size.tied else "no",
            ", ".join(filter(None, also)),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
