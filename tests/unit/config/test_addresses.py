"""Which URLs a job may contain."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.commands import COMMANDS, parser_of
from forerun.cli.main import main
from forerun.config import keys
from forerun.config.addresses import (
    DATA_PROTOCOLS,
    LOCAL_KEYS,
    LOCAL_OPTIONS,
    check_addresses,
    check_arguments,
    check_protocol,
    require_data_address,
)
from forerun.config.load import load
from forerun.data.source.files import at_address, find
from forerun.errors import JobValueError, UserError

SIGNED = [
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=SECRET&X-Amz-Signature=SECRET",  # S3
    "X-Goog-Signature=SECRET",  # Google
    "GoogleAccessId=me&Expires=1&Signature=SECRET",
    "AWSAccessKeyId=SECRET&Expires=1",
    "sv=2024-01-01&sr=b&sig=SECRET",  # Azure
    "Expires=1&Key-Pair-Id=SECRET",  # CloudFront
    "download=true;token=SECRET",
    "api_key=SECRET",
    "a=%20&access_token=SECRET",
    "key=SECRET",
    "PASSWORD=SECRET",
]


@pytest.mark.parametrize("query", SIGNED)
def test_a_signed_url_is_rejected_and_not_shown(query: str) -> None:
    with pytest.raises(JobValueError) as caught:
        check_addresses({"any": [f"https://host/file.jsonl?{query}"]}, "data.path")
    assert caught.value.code == "E-JOB-023"
    assert "SECRET" not in str(caught.value)
    with pytest.raises(UserError):
        check_arguments(["model", f"--data=https://host/file.txt?{query}"])


@pytest.mark.parametrize(
    "text",
    [
        "https://host/file.jsonl?download=true",
        "https://host/file.jsonl?author=me&page=2&keyboard=qwerty&signal=1&design=x",
        "https://host:8443/@scope/file.jsonl",
        "hf://datasets/owner/name@main/train.jsonl",
        "abfs://container@account.dfs.core.windows.net/file.parquet",
        "sftp://me@host/file.txt",
        "gs://bucket/part-?.jsonl",
        "https://example.org is a text to continue",
        "folder/token=1/a?b",
        "see http://user:password@host for an example",
        "owner/name",
    ],
)
def test_other_texts_are_accepted(text: str) -> None:
    check_addresses(text, "data.path")
    check_arguments([text, f"--data={text}"])


# Which protocols an address may have, and that no other one reaches fsspec.

# Keys with a text that is not a path of this machine; the others must be in LOCAL_KEYS or have a list of protocols.
NO_PATHS = {
    *(
        "attention",
        "checkpoint.every",
        "compiler_options",
        "data.columns",
        "data.loss_on",
        "data.separator",
        "data.system",
        "data.validation_by",
        "data.packing",
        "data.too_long",
        "device",
        "distil.revision",
    ),
    *(
        "lora.base",
        "lora.targets",
        "model.new_special_tokens",
        "model.new_tokens",
        "model.options",
        "model.revision",
        "name",
        "objective.name",
        "objective.options",
        "optimizer.name",
        "optimizer.options",
    ),
    *("optimizer.schedule", "precision.compute", "precision.params", "preferences.loss", "qat.scales", "qat.targets"),
    *("remat.keep", "remat.offload", "remat.policy", "sample.prompt", "sample.prompts"),
    *("track.entity", "track.experiment", "track.project", "track.to", "track.url"),
}
ADDRESSES = {"data.path", "data.mixture", "data.store", "checkpoint.folder"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "job.yaml").write_text("model: {layers: 1, embed: 16, heads: 2}\ndata: a.txt\n")
    return tmp_path / "job.yaml"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What fsspec was asked to open. Nothing is opened."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed (the data extra)")
    calls: list[Any] = []

    def call(*given: Any, **more: Any) -> Any:
        calls.append(given)
        raise AssertionError(f"fsspec was asked to open {given}")

    for module, name in (("core", "url_to_fs"), ("core", "open"), ("registry", "get_filesystem_class")):
        monkeypatch.setattr(importlib.import_module(f"fsspec.{module}"), name, call)
    monkeypatch.setattr(fsspec, "filesystem", call)
    monkeypatch.setattr(fsspec, "open", call)
    return calls


def refused_addresses() -> list[str]:
    from fsspec.registry import known_implementations, registry

    others = sorted({*known_implementations, *registry} - {*DATA_PROTOCOLS, "http"})
    assert len(others) > 40
    chains = ["simplecache::https://host/a.jsonl", "zip://a.jsonl::https://host/a.zip", "https://host/a::reference://b"]
    spellings = [" gs://b/x", "GS://b/x", "s3a://b/x", "reference+https://host/a", "://x", "data:text/plain,a://b"]
    return [f"{protocol}://host/a.jsonl" for protocol in others] + chains + spellings


def test_every_other_protocol_of_fsspec_is_rejected_before_it_is_opened(opened: list[Any]) -> None:
    imported = set(sys.modules)
    for address in refused_addresses():
        with pytest.raises(ValueError, match=r"data\.path"):
            check_protocol(address, "data.path")
        with pytest.raises(ValueError, match=r"checkpoint\.folder"):
            check_protocol(address, "checkpoint.folder")
        with pytest.raises(UserError):
            find(address)
        with pytest.raises(UserError):
            at_address(address, "jsonl", "")
    assert opened == []
    assert not [name for name in set(sys.modules) - imported if name.startswith("fsspec.implementations")]


@pytest.mark.parametrize(
    "address",
    [
        "file:///a.jsonl",
        "gs://b/a",
        "gcs://b/a",
        "s3://b/*.jsonl",
        "https://host/a?x=1",
        "hf://datasets/o/n",
        "a::b.txt",
        "http://localhost/a",
        "http://127.0.0.1:8000/a",
    ],
)
def test_allowed_addresses(address: str) -> None:
    require_data_address(address)
    check_protocol(address, "data.path")


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1.example.org", "localhost.example.org", "10.0.0.1"])
def test_http_is_for_this_machine_only(host: str) -> None:
    with pytest.raises(UserError):
        require_data_address(f"http://{host}/a.jsonl")


def test_every_key_with_a_text_is_known_here() -> None:
    texts = {key for key, field in keys.fields().items() if "str" in str(field.annotation)}
    assert texts - {*LOCAL_KEYS} - ADDRESSES - NO_PATHS == set()


def test_every_option_with_a_path_is_known_here() -> None:
    """An option is a path if its metavar says so; --data has a list of protocols."""
    named = {
        action.dest
        for name in COMMANDS
        for action in parser_of(name)._actions
        if action.metavar in ("FILE", "FOLDER", "RUN", "RUNS", "JOB", "SOURCE", "MODEL", "PATH")
    }
    assert named - {"data"} == set(LOCAL_OPTIONS)


@pytest.mark.parametrize("key", [*LOCAL_KEYS, "checkpoint.folder", "data.path"])
def test_a_job_with_such_an_address_is_rejected_with_its_line(job: Path, key: str, opened: list[Any]) -> None:
    changed = [f"{key}=s3a://bucket/x"] + (["distil.teacher=./t"] if key == "distil.cache" else [])
    with pytest.raises(UserError) as caught:
        load(job, changed)
    assert key in caught.value.what
    assert "command line" in caught.value.why
    assert opened == []


def test_runs_in_a_bucket_are_rejected_with_the_alternative(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    assert main(["train", str(job), "runs=gs://bucket/x"]) == 2
    assert "checkpoint.folder=gs://bucket/x" in capsys.readouterr().err
    assert sorted(path.name for path in job.parent.iterdir()) == ["a.txt", "job.yaml"]


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "JOB", "--html", "gs://b/x.html"],
        ["plan", "JOB", "--search", "--out", "gs://b/x.yaml"],
        ["data", "JOB", "--html", "https://b/x.html"],
        ["export", "runs/x", "--to", "gs://b/x"],
        ["eval", "runs/x", "--data", "reference://x"],
        ["generate", "gs://b/run", "Once"],
        ["schema", "--output", "s3://b/x.json"],
        ["init", "gs://b/job.yaml"],
    ],
)
def test_options_with_an_address_are_rejected_and_nothing_is_made(
    job: Path,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    opened: list[Any],
) -> None:
    monkeypatch.chdir(job.parent)
    assert main([str(job) if word == "JOB" else word for word in command]) == 2
    assert "://" in capsys.readouterr().err
    assert sorted(path.name for path in job.parent.iterdir()) == ["a.txt", "job.yaml"]
    assert opened == []
