"""A tokenizer from the hub for models with random weights: what is fetched, recorded, trained on and exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from error_assertions import assert_error

from forerun.config.load import load
from forerun.data.tokenizer import hub_name
from forerun.errors import UserError

sys.path.extend(str(Path(__file__).resolve().parents[1] / place) for place in ("hub", "data/tokens"))
from hub_server import HubServer

NAME = "acme/words"
TEMPLATE = (
    "{% for m in messages %}{{ '<|head|>' + m.role + '\n' + m.content + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant\n' }}{% endif %}"
)
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
# The client reads its settings when it is imported, so this runs in its own process.
PROGRAM = """
import io, json, sys
from pathlib import Path
from forerun.verbs.export.export import export
from forerun.config.load import load
from forerun.errors import UserError
from forerun.resolve.job_corpus import dialect_of
from forerun.resolve.resolve_model import resolve_model
from forerun.run.train import train
from forerun.track.display.make_display import make_display

vocabularies = {}
for model in ("qwen3-0.6b", "own:Model"):
    vocabularies[model] = resolve_model(load(Path("job.yaml"), [f"model={model}"]).job).vocab
job = load(Path("job.yaml"), []).job
dialect = dialect_of(resolve_model(job))
with make_display(io.StringIO()) as display:
    train(job, display)
export("runs/job", "exported")
try:
    resolve_model(load(Path("job.yaml"), ["data.tokenizer=acme/bare"]).job)
except UserError as error:
    bare = error.code
print(json.dumps({"vocabularies": vocabularies, "template": dialect.template, "special": dict(dialect.special),
                  "bare": bare, "path": dialect.tokenizer.path}))
"""


def publish(folder: Path) -> None:
    """Write a model repository, of which only the tokenizer files are wanted."""
    from small_tokenizers import byte_level, saved

    folder.mkdir(parents=True)
    saved(byte_level(), folder)
    config = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')
    (folder / "model.safetensors").write_bytes(bytes(100))
    (folder / "tokenizer.py").write_text("raise SystemExit('this ran')")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with a tokenizer from the hub and its export, and everything that the hub was asked for."""
    folder = tmp_path_factory.mktemp("hub_tokenizer")
    publish(folder / "hub" / NAME)
    (folder / "hub" / "acme" / "bare").mkdir()
    (folder / "hub" / "acme" / "bare" / "README.md").write_text("no tokenizer")
    chat = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the quick fox"}]}
    (folder / "chat.jsonl").write_text((json.dumps(chat) + "\n") * 4)
    (folder / "job.yaml").write_text(
        f"name: job\nmodel: {{layers: 1, embed: 16, heads: 2}}\ndata: {{path: chat.jsonl, tokenizer: {NAME}}}\n"
        "sequence: 32\nbatch: 1\nsteps: 1\ndevice: cpu\ndevices: 1\nsample: {tokens: 0}\n"
    )
    (folder / "own.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Model:\n"
        "    vocab: int = 1\n    heads = None\n"
        "    def specs(self): return {}\n    def apply(self, *a): ...\n    def flops_per_token(self, s): return 0.0\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    source = Path(__file__).resolve().parents[3] / "src"
    with HubServer(folder / "hub") as hub:
        env = clean | {
            "HF_HOME": str(folder / "home"), "HF_ENDPOINT": hub.endpoint, "PYTHONPATH": f"{source}:{folder}",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120",
            "XDG_CACHE_HOME": str(folder / "xdg"),
        }  # fmt: skip
        ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return {
            **json.loads(ran.stdout),
            "folder": folder,
            "fetched": hub.fetched("GET"),
            "commit": hub.commit(NAME),
        }


def test_only_the_tokenizer_files_are_fetched_once(work: dict[str, Any]) -> None:
    assert sorted(work["fetched"]) == sorted(TOKENIZER_FILES)
    assert work["commit"] in work["path"]
    assert work["bare"] == "E-DATA-079"


def test_the_commit_is_recorded_in_the_run(work: dict[str, Any]) -> None:
    job = load(work["folder"] / "runs" / "job" / "job.yaml").job
    assert job.data.tokenizer == f"{NAME}@{work['commit']}"


def test_the_vocabulary_follows_the_tokenizer(work: dict[str, Any]) -> None:
    from small_tokenizers import byte_level

    ids = byte_level().get_vocab_size()
    assert 256 < ids < 384
    assert work["vocabularies"] == {"qwen3-0.6b": 384, "own:Model": ids}
    assert load(work["folder"] / "runs" / "job" / "job.yaml").job.model.vocab == 384


def test_the_template_and_the_end_come_with_the_tokenizer(work: dict[str, Any]) -> None:
    assert work["template"] == TEMPLATE
    assert work["special"] == {"eos_token": "</s>"}


def test_the_export_has_this_tokenizer(work: dict[str, Any]) -> None:
    from small_tokenizers import byte_level

    exported = work["folder"] / "exported"
    for name in TOKENIZER_FILES:
        assert (exported / name).read_bytes() == (work["folder"] / "hub" / NAME / name).read_bytes()
    ends = [byte_level().token_to_id(text) for text in ("<|eot_id|>", "</s>")]
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == ends
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == ends[1]
    assert json.loads((exported / "config.json").read_text())["vocab_size"] == 384


@pytest.mark.torch
def test_transformers_renders_the_export_as_it_was_trained(work: dict[str, Any]) -> None:
    import transformers

    theirs: Any = transformers.AutoTokenizer.from_pretrained(work["folder"] / "exported")
    chat = [{"role": "user", "content": "hello"}]
    wanted = "<|head|>user\nhello<|eot_id|><|head|>assistant\n"
    assert theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == wanted
    assert theirs.eos_token == "</s>"


def test_a_name_is_a_path_if_it_exists_or_is_written_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text("model: {layers: 1, embed: 16, heads: 2}\ndata: {path: x}\n")
    (tmp_path / "own" / "folder").mkdir(parents=True)
    kept = {
        "owner/name": "owner/name",
        "owner/name@v1": "owner/name@v1",
        "owner/name@refs/pr/1": "owner/name@refs/pr/1",
    }
    kept |= {"bytes": "bytes"}
    kept |= {name: str(tmp_path / name) for name in ("own/folder", "folder", "a/b.json", "a/b/c", "own/../x")}
    kept["own/../x"] = str(tmp_path / "x")
    for given, wanted in kept.items():
        text = f"model: {{layers: 1, embed: 16, heads: 2}}\ndata: {{path: x, tokenizer: {given}}}\n"
        (tmp_path / "job.yaml").write_text(text)
        assert load(tmp_path / "job.yaml").job.data.tokenizer == wanted, given


def test_names_of_the_hub_have_an_optional_revision() -> None:
    assert hub_name("owner/name") == ("owner/name", None)
    assert hub_name("owner/name@refs/pr/1") == ("owner/name", "refs/pr/1")
    for path in ("bytes", "./a/b", "/a/b", "a/tokenizer.json", "a", "a/b/c"):
        assert hub_name(path) is None
    with pytest.raises(UserError) as refused:
        hub_name("owner/name@")
    assert_error(refused.value, "E-DATA-140", what="owner/name@")
