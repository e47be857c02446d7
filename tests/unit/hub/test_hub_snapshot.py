"""The real client against a hub on this machine: what is fetched, what is never asked for, what a failure says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import EXPIRED, HubServer
from safetensors.numpy import save_file

NAME = "acme/tiny"
PROGRAM = """
import json, sys
from forerun.errors import UserError
from forerun.hub.snapshot import snapshot
name, revision, weights = sys.argv[1], sys.argv[2] or None, sys.argv[3] == "weights"
try:
    found = snapshot(name, revision, weights=weights)
except UserError as error:
    print(json.dumps({"error": str(error)}))
else:
    files = sorted(path.name for path in found.folder.iterdir())
    tensors = {}
    if weights:
        with found.open_weights() as opened:
            whole = sys.argv[4] == "values"
            tensors = {key: opened.view(key).tolist() if whole else opened[key].data_bytes for key in opened}
    print(json.dumps({"revision": found.revision, "files": files, "tensors": tensors, "config": found.config()}))
"""
TENSORS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.arange(4096, dtype=np.int32)}


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    source = str(Path(__file__).resolve().parents[3] / "src")
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    quiet |= {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}  # the hub here is never late
    return clean | quiet | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": source} | more


def command(name: str, revision: str | None = None, weights: bool = True, show: str = "values") -> list[str]:
    return [sys.executable, "-c", PROGRAM, name, revision or "", "weights" if weights else "small", show]


def ask(env: dict[str, str], name: str = NAME, **how: Any) -> dict[str, Any]:
    """What `snapshot` gives or says, in a process of its own: the client reads its settings when it is imported."""
    ran = subprocess.run(command(name, **how), env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    """A sharded model with everything beside it that must stay where it is."""
    folder = tmp_path / "hub" / NAME
    (folder / "onnx").mkdir(parents=True)
    weight_map = {}
    for number, (key, value) in enumerate(TENSORS.items(), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({key: value}, folder / file)
        weight_map[key] = file
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoModel": "modeling.Evil"}}')
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"file": name}))
    (folder / "modeling.py").write_text("raise SystemExit('this ran')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (folder / "README.md").write_text("# tiny")
    save_file(TENSORS, folder / "consolidated.safetensors")
    save_file(TENSORS, folder / "onnx" / "model.safetensors")
    return tmp_path / "hub"


def test_a_model_is_fetched_whole_and_nothing_else_is(repositories: Path, tmp_path: Path) -> None:
    with HubServer(repositories) as hub:
        found = ask(environment(tmp_path / "home", hub.endpoint))
        assert found["revision"] == hub.commit(NAME)
        assert found["tensors"] == {key: value.tolist() for key, value in TENSORS.items()}
        wanted = {
            "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
            "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        }  # fmt: skip
        assert set(found["files"]) == wanted
        assert sorted(hub.fetched("GET")) == sorted(wanted), "each once, and no .py, .bin, README or subfolder"
        assert set(hub.fetched("HEAD")) <= wanted


def test_small_files_only(repositories: Path, tmp_path: Path) -> None:
    with HubServer(repositories) as hub:
        found = ask(environment(tmp_path / "home", hub.endpoint), weights=False)
        assert found["config"]["model_type"] == "llama"
        assert [file for file in hub.fetched() if file.endswith(".safetensors")] == []


def test_a_cut_connection_is_resumed_where_it_broke(repositories: Path, tmp_path: Path) -> None:
    """The client writes in blocks of 10 MiB, and asks for what comes after the last whole one."""
    file = "model-00002-of-00002.safetensors"
    numbers = np.random.default_rng(0).integers(0, 256, 12 << 20, np.uint8)
    save_file({"b.weight": numbers}, repositories / NAME / file)
    with HubServer(repositories, cuts={file: [11 << 20]}) as hub:
        env = environment(tmp_path / "home", hub.endpoint)
        assert ask(env, show="sizes")["tensors"] == {"a.weight": 24, "b.weight": 12 << 20}
        ranges = [request.range for request in hub.requests if request.method == "GET" and request.file == file]
        assert ranges == [None, f"bytes={10 << 20}-"]
        fetched = next((tmp_path / "home").rglob(file))
        assert fetched.read_bytes() == (repositories / NAME / file).read_bytes()


def test_a_connection_that_keeps_breaking_says_that_the_same_command_goes_on(
    repositories: Path, tmp_path: Path
) -> None:
    file = "model-00002-of-00002.safetensors"
    with HubServer(repositories, cuts={file: [5000] + [0] * 20}) as hub:
        env = environment(tmp_path / "home", hub.endpoint)
        error = ask(env)["error"]
        assert f"download of {NAME} was interrupted" in error
        assert "[E-HUB-027]" in error
        hub.cuts.clear()
        hub.requests.clear()
        assert ask(env)["revision"] == hub.commit(NAME)
        assert hub.fetched("GET") == [file], "what was whole is not fetched again"


@pytest.mark.timing
def test_a_killed_download_goes_on_in_the_next_run(repositories: Path, tmp_path: Path) -> None:
    file = "model-00002-of-00002.safetensors"
    with HubServer(repositories, stall=file) as hub:
        env = environment(tmp_path / "home", hub.endpoint)
        running = subprocess.Popen(command(NAME), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert hub.stalled.wait(300)
        running.send_signal(signal.SIGKILL)
        running.communicate()
        hub.stall = None
        before = set(hub.fetched("GET"))
        hub.requests.clear()
        found = ask(env)
        assert found["tensors"] == {key: value.tolist() for key, value in TENSORS.items()}
        assert {"config.json", "tokenizer.json"} <= before
        assert set(hub.fetched("GET")) <= {file, "model-00001-of-00002.safetensors"}


def test_offline_after_a_first_run(repositories: Path, tmp_path: Path) -> None:
    with HubServer(repositories) as hub:
        first = ask(environment(tmp_path / "home", hub.endpoint))
        hub.requests.clear()
        offline = environment(tmp_path / "home", hub.endpoint, HF_HUB_OFFLINE="1")
        assert ask(offline) == first
        assert hub.requests == []


def test_a_commit_that_is_here_needs_no_hub(repositories: Path, tmp_path: Path) -> None:
    with HubServer(repositories) as hub:
        env = environment(tmp_path / "home", hub.endpoint)
        first = ask(env)
        hub.requests.clear()
        assert ask(env, revision=first["revision"]) == first
        assert hub.requests == []


def test_offline_with_only_the_small_files(repositories: Path, tmp_path: Path) -> None:
    with HubServer(repositories) as hub:
        ask(environment(tmp_path / "home", hub.endpoint), weights=False)
        error = ask(environment(tmp_path / "home", hub.endpoint, HF_HUB_OFFLINE="1"))["error"]
        assert "[E-HUB-035]" in error
        assert "model-00001-of-00002.safetensors is missing" in error


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, ("is gated", "401", "no token was sent", "accept its terms", "hf auth login")),
        ("hf_wrong", ("is gated", "403", "not been given access", "accept its terms")),
    ],
)
def test_a_gated_model(repositories: Path, tmp_path: Path, token: str | None, words: tuple[str, ...]) -> None:
    with HubServer(repositories, gated={NAME: {"hf_right"}}) as hub:
        more = {"HF_TOKEN": token} if token else {}
        error = ask(environment(tmp_path / "home", hub.endpoint, **more))["error"]
        assert [word for word in words if word not in error] == []
        assert f"{hub.endpoint}/{NAME}" in error
        assert {request.token for request in hub.requests} == {token}
        assert list((tmp_path / "home").rglob("config.json")) == []
        assert ask(environment(tmp_path / "home", hub.endpoint, HF_TOKEN="hf_right"))["tensors"]


@pytest.mark.parametrize(
    ("server", "settings", "request_of", "code"),
    [
        ({}, {"HF_TOKEN": EXPIRED}, {}, "E-HUB-024"),
        ({"broken": True}, {}, {}, "E-HUB-025"),
        ({}, {}, {"revision": "v9"}, "E-HUB-018"),
        ({}, {}, {"name": "acme/tiny2"}, "E-HUB-021"),
        ({}, {"HF_HUB_OFFLINE": "1"}, {}, "E-HUB-023"),
    ],
    ids=["expired token", "hub in trouble", "missing revision", "missing model", "offline without a copy"],
)
def test_a_failure_has_a_code(
    repositories: Path,
    tmp_path: Path,
    server: dict[str, Any],
    settings: dict[str, str],
    request_of: dict[str, str],
    code: str,
) -> None:
    with HubServer(repositories, **server) as hub:
        error = ask(environment(tmp_path / "home", hub.endpoint, **settings), **request_of)["error"]
        assert f"[{code}]" in error
        assert (hub.requests == []) == ("HF_HUB_OFFLINE" in settings)


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        error = ask(environment(tmp_path / "home", endpoint))["error"]
    assert f"cannot be reached for {NAME}" in error
    assert endpoint in error


def test_pickle_only_is_refused_and_not_fetched(repositories: Path, tmp_path: Path) -> None:
    for path in (repositories / NAME).glob("*.safetensors*"):
        path.unlink()
    with HubServer(repositories) as hub:
        for weights in (True, False):
            error = ask(environment(tmp_path / "home", hub.endpoint), weights=weights)["error"]
            assert "only as pickle" in error
            assert "pytorch_model.bin" in error
            assert "safe_serialization=True" in error
        assert hub.fetched("GET") == hub.fetched("HEAD") == []


def test_a_disk_without_room_is_told_before_the_download(repositories: Path, tmp_path: Path) -> None:
    file = "model-00001-of-00002.safetensors"
    with HubServer(repositories, announced_bytes={file: 1 << 60}) as hub:
        error = ask(environment(tmp_path / "home", hub.endpoint))["error"]
        assert "too little space" in error
        assert "download needs 1,024" in error
        assert [name for name in hub.fetched() if name.endswith(".safetensors")] == []


def test_an_index_that_names_a_missing_shard(repositories: Path, tmp_path: Path) -> None:
    (repositories / NAME / "model-00002-of-00002.safetensors").unlink()
    with HubServer(repositories) as hub:
        error = ask(environment(tmp_path / "home", hub.endpoint))["error"]
        assert "1 of 2" in error


def test_a_single_file_model(repositories: Path, tmp_path: Path) -> None:
    folder = repositories / NAME
    for path in (*folder.glob("model-*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink()
    save_file(TENSORS, folder / "model.safetensors")
    with HubServer(repositories) as hub:
        env = environment(tmp_path / "home", hub.endpoint)
        assert ask(env)["tensors"] == {key: value.tolist() for key, value in TENSORS.items()}
        ask(environment(tmp_path / "other", hub.endpoint), weights=False)
        error = ask(environment(tmp_path / "other", hub.endpoint, HF_HUB_OFFLINE="1"))["error"]
        assert "model.safetensors is missing" in error
