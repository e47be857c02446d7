"""Export of a run whose model is a class of the user: weights, source files as data, and no code that runs unasked."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import assert_error
from recording_reporter import RecordingReporter
from safetensors.numpy import load_file, save_file

from forerun.cli.main import main
from forerun.config.load import load
from forerun.errors import UserError
from forerun.models.plugin import job_folder, use_job_folder
from forerun.nn.compute import Compute
from forerun.resolve.resolve_model import resolve_model
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.trained_model.load_model import LoadedModel, load_model
from forerun.verbs.evaluate import longest_context
from forerun.verbs.export.export import export

MODULES = ("exported_net", "exported_sizes")
NET = """\
from dataclasses import dataclass

from exported_sizes import WIDTH
from forerun.models.base import Readout
from forerun.nn.spec import Normal, ParamSpec


@dataclass(frozen=True)
class Net:
    vocab: int
    scale: float = 1.0
    heads = None

    def specs(self):
        scale = ParamSpec((WIDTH,), "E", Normal(1.0))
        return {"embed": ParamSpec((self.vocab, WIDTH), "VE", Normal(1.0)), "norm": {"scale": scale}}

    def apply(self, params, tokens_BS, segments_BS, positions_BS, compute):
        embed = params["embed"].astype(compute.dtype)
        return Readout(self.scale * embed[tokens_BS] * params["norm"]["scale"].astype(compute.dtype), embed)

    def flops_per_token(self, sequence):
        return 100.0
"""
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def forget() -> None:
    use_job_folder(None)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with a class beside it, and its run of two steps in another folder."""
    place = tmp_path_factory.mktemp("custom")
    (place / "job").mkdir()
    (place / "job" / "exported_net.py").write_text(NET)
    (place / "job" / "exported_sizes.py").write_text("WIDTH = 8\n")
    (place / "job" / "text.txt").write_text("All work and no play makes a dull model; " * 60)
    (place / "job" / "chat.jinja").write_text(CHAT)
    (place / "job" / "job.yaml").write_text(
        'name: run\nmodel: {name: "exported_net:Net", options: {scale: 0.5}}\n'
        "data: {path: text.txt, tokenizer: bytes, chat_template: chat.jinja}\nsequence: 32\nbatch: 8\nsteps: 2\n"
        f"device: cpu\nsample: {{tokens: 0}}\noptimizer: {{lr: 1.0e-2, warmup: 0}}\nruns: {place / 'runs'}\n"
    )
    return place


@pytest.fixture(autouse=True)
def _separate(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user with a home of their own, in an empty working directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "home"))
    monkeypatch.chdir(tmp_path)
    forget()
    yield
    forget()


@pytest.fixture
def run(place: Path) -> Path:
    folder = place / "runs" / "run"
    if not folder.exists():
        use_job_folder(place / "job")
        with make_display(io.StringIO()) as display:
            train(load(place / "job" / "job.yaml").job, display)
        forget()
    return folder


@pytest.fixture
def exported(place: Path, run: Path) -> Path:
    if not (place / "out").exists():
        export(str(run), str(place / "out"))
        forget()
    return place / "out"


def logits(loaded: LoadedModel) -> Any:
    tokens = np.asarray([[65, 108, 105, 99, 101]] * 8, np.int32)
    places = np.broadcast_to(np.arange(5, dtype=np.int32), tokens.shape)
    with jax.set_mesh(loaded.mesh):
        return np.asarray(loaded.model.apply(loaded.params, tokens, tokens * 0 + 1, places, Compute()).logits())[0]


def test_the_folder_has_weights_source_files_and_digests(exported: Path, place: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    own = config["forerun"]
    assert (config["model_type"], config["vocab_size"], own["class"]) == ("forerun_custom", 257, "exported_net:Net")
    assert own["options"] == {"scale": 0.5}
    assert own["changed_since_training"] == []
    assert set(own["files"]) == {f"{name}.py" for name in MODULES}
    for name, digest in own["files"].items():
        content = (exported / "code" / name).read_bytes()
        assert content == (place / "job" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
    assert "--code" in (exported / "code" / "NOTICE.txt").read_text()
    tensors = load_file(exported / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {"embed": (257, 8), "norm.scale": (8,)}
    assert (exported / "tokenizer.json").exists()
    assert (exported / "chat_template.jinja").read_text() == CHAT


def test_the_export_computes_the_logits_of_the_run(exported: Path, run: Path, place: Path) -> None:
    ours = load_model(str(run))
    forget()
    told: list[str] = []
    theirs = load_model(str(exported), code=str(place / "job"), reporter=RecordingReporter(told))
    assert told == []
    np.testing.assert_array_equal(logits(theirs), logits(ours))
    assert theirs.chat_template == ours.chat_template
    assert theirs.eos == ours.eos
    assert theirs.tokenizer.encode("Été 1").tolist() == ours.tokenizer.encode("Été 1").tolist()
    assert longest_context(str(exported)) == 32


def test_the_code_in_an_export_is_never_imported_unasked(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as refused:
        load_model(str(exported))
    assert_error(refused.value, "E-RUN-013")
    monkeypatch.syspath_prepend(str(exported / "code"))
    with pytest.raises(UserError) as refused:  # not even if Python would find the module
        load_model(str(exported))
    assert_error(refused.value, "E-RUN-013")
    assert not set(MODULES) & set(sys.modules)


def test_the_config_of_an_export_cannot_choose_an_installed_class(exported: Path, place: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "evil")
    config = json.loads((exported / "config.json").read_text())
    config["forerun"]["class"] = "subprocess:Popen"
    (tmp_path / "evil" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        load_model(str(tmp_path / "evil"), code=str(place / "job"))
    assert_error(refused.value, "E-RUN-012", what="subprocess")
    assert job_folder() is None
    config["forerun"]["class"] = "no class"
    (tmp_path / "evil" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        load_model(str(tmp_path / "evil"), code=str(place / "job"))
    assert_error(refused.value, "E-MODEL-032")


def test_changed_source_is_reported_by_export_and_by_every_user_of_it(
    exported: Path, run: Path, place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "job", tmp_path / "changed")
    (tmp_path / "changed" / "exported_sizes.py").write_text("WIDTH = 8  # as before\n")
    said: list[str] = []
    export(str(run), str(tmp_path / "out"), code=str(tmp_path / "changed"), reporter=RecordingReporter(said))
    forget()
    assert [line for line in said if "exported_sizes.py" in line and "exported_net" not in line]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["forerun"]["changed_since_training"] == ["exported_sizes.py"]
    assert "exported_sizes.py" in (tmp_path / "out" / "README.md").read_text()
    said.clear()
    load_model(str(exported), code=str(tmp_path / "changed"), reporter=RecordingReporter(said))
    [line] = said
    assert "exported_sizes.py" in line


def test_weights_of_another_class_are_an_error(exported: Path, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "job", tmp_path / "changed")
    (tmp_path / "changed" / "exported_sizes.py").write_text("WIDTH = 6\n")
    with pytest.raises(UserError) as refused:
        load_model(str(exported), code=str(tmp_path / "changed"))
    assert_error(refused.value, "E-MODEL-031", why="embed")


def test_a_job_cannot_start_from_the_export(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    (tmp_path / "job.yaml").write_text(f"model: {exported}\ndata: text.txt\nsteps: 1\n")
    with pytest.raises(UserError) as refused:
        resolve_model(load(tmp_path / "job.yaml").job)
    assert_error(refused.value, "E-MODEL-030")


def test_the_readme_loads_the_weights_with_plain_jax(exported: Path, place: Path) -> None:
    text = (exported / "README.md").read_text()
    [snippet] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", snippet], cwd=exported, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = load_model(str(exported), code=str(place / "job"))
    assert done.stdout.split() == str(logits(loaded).argmax(-1)[None]).split()


def test_bfloat16_is_the_rounded_weights(run: Path, tmp_path: Path) -> None:
    done = export(str(run), str(tmp_path / "half"), dtype="bfloat16")
    assert done.is_custom
    assert "bfloat16" in done.proof
    exact = load_model(str(run))
    forget()
    halved = load_model(str(tmp_path / "half"), code=str(tmp_path / "half" / "code"))
    for name in ("embed",):
        ours, theirs = (np.asarray(x.params[name]) for x in (exact, halved))
        np.testing.assert_array_equal(theirs, ours.astype("bfloat16").astype("float32"))


def test_the_commands_work_from_any_folder(
    exported: Path, run: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "held_out.txt").write_text("No play makes a model dull.\n")
    code = ["--code", str(place / "job")]
    answers = []
    for words in (["generate", str(run), "All"], ["generate", str(exported), "All", *code]):
        assert main([*words, "--max-tokens", "3", "--temperature", "0"]) == 0
        answers.append(capsys.readouterr().out)
        forget()
    assert answers[0] == answers[1] != ""
    losses = []
    for words in ([str(run)], [str(exported), *code]):
        assert main(["eval", *words, "--data", "held_out.txt", "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["data"]["loss"])
        forget()
    assert losses[0] == losses[1]
    assert main(["export", str(run), "--to", str(tmp_path / "again")]) == 0
    assert "--code" in capsys.readouterr().out


def test_a_damaged_tensor_is_an_error(exported: Path, place: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "damaged")
    tensors = load_file(exported / "model.safetensors")
    save_file({"embed": tensors["embed"]}, tmp_path / "damaged" / "model.safetensors")
    with pytest.raises(UserError) as refused:
        load_model(str(tmp_path / "damaged"), code=str(place / "job"))
    assert_error(refused.value, "E-MODEL-031", why="norm.scale")


def test_a_class_of_the_user_has_no_gguf_form(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        export(str(run), str(tmp_path / "out"), gguf="q8_0")
    assert_error(raised.value, "E-COMMAND-053", what="exported_net:Net")
    assert not (tmp_path / "out").exists()
