"""Datasets of the hub by name: the real client against a hub on this machine, and the choice of files from names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from forerun.data.source import hub
from forerun.errors import UserError

sys.path.append(str(Path(__file__).resolve().parents[2] / "hub"))
from hub_server import EXPIRED, HubServer

NAME = "acme/tales"
PLACE = f"hf://datasets/{NAME}"
PROGRAM = """
import json, sys
from forerun.data.source.files import find
from forerun.data.source.hub import dataset
from forerun.errors import UserError

def answer(place):
    try:
        found = dataset(place)
    except UserError as error:
        return {"error": str(error)}
    folder = next(parent for parent in found.files[0].parents if parent.name == found.revision)
    texts = {str(path.relative_to(folder)): path.read_text() for path in found.files}
    assert [file.name for file in find(place)] == [str(path) for path in found.files]
    return {"texts": texts, "revision": found.revision}

print(json.dumps([answer(place) for place in sys.argv[1:]]))
assert "jax" not in sys.modules
"""


LIMITED = """
import json, sys
from forerun.config.schema import Part
from forerun.data.source.sources import open_source

source = open_source(Part(path=sys.argv[1], limit=int(sys.argv[2])))
print(json.dumps([row.values["text"] for piece in source.pieces(1 << 30) for row in source.rows(piece)]))
"""


def answers(places: list[str], home: Path, endpoint: str, program: str = PROGRAM, **more: str) -> list[Any]:
    """What `dataset` gives or says, in a process of its own: the client reads its settings when it is imported."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    quiet |= {"HF_HUB_ETAG_TIMEOUT": "300", "HF_HUB_DOWNLOAD_TIMEOUT": "300"}  # a slow machine is asked once, too
    source = str(Path(__file__).resolve().parents[4] / "src")
    env = clean | quiet | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": source} | more
    ran = subprocess.run([sys.executable, "-c", program, *places], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def ask(place: str, home: Path, endpoint: str, **more: str) -> dict[str, Any]:
    return answers([place], home, endpoint, **more)[0]


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    """Two shards of train and everything beside them that must stay where it is."""
    write(
        tmp_path / "hub" / "datasets" / NAME,
        "data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl",
        "tales.py", "README.md", "dataset_infos.json", "cover.png",
    )  # fmt: skip
    return tmp_path / "hub"


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'{{"text": "of {name}"}}\n')


TRAIN = {f"data/train-0000{n}-of-00002.jsonl": f'{{"text": "of data/train-0000{n}-of-00002.jsonl"}}\n' for n in (0, 1)}


def test_the_train_files_are_fetched_once_and_nothing_else_is(repositories: Path, tmp_path: Path) -> None:
    with HubServer(repositories) as server:
        found = ask(PLACE, tmp_path / "home", server.endpoint)
        commit = server.commit(f"datasets/{NAME}")
        assert found == {"texts": TRAIN, "revision": commit}
        assert sorted(server.fetched()) == sorted([*TRAIN, "README.md"]), "each once, and no script"


def test_a_limit_fetches_only_the_files_that_hold_its_rows(repositories: Path, tmp_path: Path) -> None:
    home, offline = tmp_path / "home", {"HF_HUB_OFFLINE": "1"}
    first, second = (f"of {name}" for name in TRAIN)
    with HubServer(repositories) as server:
        assert answers([PLACE, "1"], home, server.endpoint, LIMITED) == [first]
        assert sorted(server.fetched()) == ["README.md", *list(TRAIN)[:1]]
        assert answers([PLACE, "1"], home, server.endpoint, LIMITED, **offline) == [first]
        assert answers([PLACE, "2"], home, server.endpoint, LIMITED) == [first, second]
        assert sorted(server.fetched()) == ["README.md", *TRAIN]


def test_offline_gives_the_same_and_a_part_is_never_taken_for_the_whole(repositories: Path, tmp_path: Path) -> None:
    home, offline = tmp_path / "home", {"HF_HUB_OFFLINE": "1"}
    with HubServer(repositories) as server:
        one = f"{PLACE}/data/train-00001-of-00002.jsonl"
        part = ask(one, home, server.endpoint)
        assert list(part["texts"]) == ["data/train-00001-of-00002.jsonl"]
        server.requests.clear()
        asked = [one, f"{PLACE}/data", PLACE, "hf://datasets/acme/other"]
        same, folder, whole, other = answers(asked, home, server.endpoint, **offline)
        assert same == part
        assert "[E-DATA-039]" in folder["error"]
        assert "data/train-00000-of-00002.jsonl is missing" in folder["error"]
        assert "README.md is missing" in whole["error"]
        assert "acme/other is not" in other["error"]
        assert server.requests == []
        fetched = ask(PLACE, home, server.endpoint)
        assert fetched["texts"] == TRAIN
        assert ask(PLACE, home, server.endpoint, **offline) == fetched


def test_a_whole_commit_that_is_here_asks_the_hub_nothing(repositories: Path, tmp_path: Path) -> None:
    with HubServer(repositories) as server:
        pinned = f"{PLACE}@{server.commit(f'datasets/{NAME}')}"
        first = ask(pinned, tmp_path / "home", server.endpoint)
        assert first["texts"] == TRAIN
        server.requests.clear()
        assert ask(pinned, tmp_path / "home", server.endpoint) == first
        assert server.requests == []


def test_what_another_tool_fetched_is_not_taken_for_the_whole(repositories: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with HubServer(repositories) as server:
        ask(PLACE, home, server.endpoint)
        for file in home.glob("hub/datasets--acme--tales/forerun/*.json"):
            file.unlink()
        error = ask(PLACE, home, server.endpoint, HF_HUB_OFFLINE="1")["error"]
        assert "[E-DATA-038]" in error
        assert f"data.path={home}/hub/datasets--acme--tales/snapshots/" in error


def test_another_revision_and_the_parquet_that_the_hub_made(repositories: Path, tmp_path: Path) -> None:
    beside = repositories / "datasets" / f"{NAME}@refs%2Fconvert%2Fparquet"
    write(beside, "default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet")
    with HubServer(repositories) as server:
        revisions = [f"{PLACE}@{revision}" for revision in ("refs/convert/parquet", "refs%2Fconvert%2Fparquet", "v9")]
        found, quoted, missing = answers(revisions, tmp_path / "home", server.endpoint)
        assert list(found["texts"]) == ["default/train/0000.parquet", "default/train/0001.parquet"]
        assert found["revision"] == server.commit(f"datasets/{NAME}", "refs/convert/parquet")
        assert quoted == found
        assert ask(revisions[0], tmp_path / "home", server.endpoint, HF_HUB_OFFLINE="1") == found
        error = missing["error"]
        assert f"{NAME} has no revision 'v9'" in error
        assert f"the dataset exists, but not that branch, tag or commit: see {server.endpoint}/datasets/{NAME}" in error


def test_the_card_chooses(repositories: Path, tmp_path: Path) -> None:
    folder = repositories / "datasets" / NAME
    write(folder, "more/a.jsonl", "more/b.jsonl")
    card = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: more/*.jsonl"
    (folder / "README.md").write_text(f"---\nlicense: mit\n{card}\n---\n# Tales\n")
    with HubServer(repositories) as server:
        found = ask(PLACE, tmp_path / "home", server.endpoint)
    assert list(found["texts"]) == ["more/a.jsonl", "more/b.jsonl"]


def test_a_dataset_that_is_only_a_script_is_refused_and_not_fetched(tmp_path: Path) -> None:
    write(tmp_path / "hub" / "datasets" / NAME, "tales.py", "dataset_infos.json")
    with HubServer(tmp_path / "hub") as server:
        error = ask(PLACE, tmp_path / "home", server.endpoint)["error"]
        assert server.fetched() == []
    assert "E-DATA-056" in error
    assert "script tales.py" in error
    assert "never run" in error
    assert f"{PLACE}@refs/convert/parquet" in error


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", ["is gated", "no token was sent", "/datasets/acme/tales and accept its terms"]),
        ("hf_other", ["is gated", "you have not been given access", "/datasets/acme/tales, accept its terms"]),
        (EXPIRED, ["the hub does not let you read acme/tales", "may not read this dataset"]),
    ],
)
def test_who_may_not_read(repositories: Path, tmp_path: Path, token: str, words: list[str]) -> None:
    with HubServer(repositories, gated={f"datasets/{NAME}": {"hf_good"}}) as server:
        error = ask(PLACE, tmp_path / "home", server.endpoint, **({"HF_TOKEN": token} if token else {}))["error"]
        assert [word for word in words if word not in error] == [], error
        if not token:
            assert ask(PLACE, tmp_path / "home", server.endpoint, HF_TOKEN="hf_good")["texts"] == TRAIN


def test_no_such_dataset_and_no_hub(repositories: Path, tmp_path: Path) -> None:
    with HubServer(repositories) as server:
        error = ask("hf://datasets/acme/tails", tmp_path / "home", server.endpoint)["error"]
        assert "dataset acme/tails that" in error
        assert "folder" not in error
    with socket() as deaf:  # bound, so that nobody else answers there
        deaf.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        assert "[E-HUB-026]" in ask(PLACE, tmp_path / "home", endpoint)["error"]


def test_a_disk_without_room_is_told_before_the_download(repositories: Path, tmp_path: Path) -> None:
    file = "data/train-00001-of-00002.jsonl"
    program = (
        "from forerun.data.source import hub\nhub.DOWNLOAD_BYTES = 10**19\n" + PROGRAM
    )  # nothing is read by ranges
    with HubServer(repositories, announced_bytes={file: 10**18}) as server:
        error = answers([PLACE], tmp_path / "home", server.endpoint, program)[0]["error"]
        assert server.fetched() == ["README.md"]
    assert "space for acme/tales" in error
    assert "files in data.path" in error


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("hf://datasets/a/b", ("a/b", None, "")),
        ("hf://datasets/a/b/", ("a/b", None, "")),
        ("hf://datasets/a/b@v1.0/data/*.parquet", ("a/b", "v1.0", "data/*.parquet")),
        ("hf://datasets/a/b@refs/convert/parquet", ("a/b", "refs/convert/parquet", "")),
        ("hf://datasets/a/b@refs/convert/parquet/en/train", ("a/b", "refs/convert/parquet", "en/train")),
        ("hf://datasets/a/b@refs%2Fpr%2F7/x.csv", ("a/b", "refs/pr/7", "x.csv")),
        ("hf://datasets/a/b@my%2Fbranch/x", ("a/b", "my/branch", "x")),
        ("hf://datasets/a/b/mail@home.csv", ("a/b", None, "mail@home.csv")),
    ],
)
def test_addresses_mean_what_they_mean_to_the_hubs_own_client(place: str, parts: tuple[str, str | None, str]) -> None:
    found = hub.parse(place)
    assert (found.name, found.revision, found.path) == parts
    uris = pytest.importorskip("huggingface_hub.utils._hf_uris")
    theirs = uris.parse_hf_uri(place.rstrip("/"))
    assert (theirs.id, theirs.revision, theirs.path_in_repo) == parts


@pytest.mark.parametrize(
    ("place", "fix"),
    [
        ("hf://acme/tales", "data.path=hf://datasets/acme/tales"),
        ("hf://models/acme/tales", "hf://datasets/owner/name"),
        ("hf://datasets/tales", "hf://datasets/owner/name"),
        ("hf://datasets/", "hf://datasets/owner/name"),
        ("hf://datasets/acme/tales@", "hf://datasets/owner/name"),
        ("hf://datasets/../tales", "hf://datasets/owner/name"),
    ],
)
def test_a_wrong_address_is_refused_with_the_right_form(place: str, fix: str) -> None:
    with pytest.raises(UserError) as refused:
        hub.parse(place)
    assert fix in refused.value.fix


CHOICES = {
    "one file": (["all.jsonl"], "", ["all.jsonl"]),
    "one file per split": (["train.jsonl", "test.jsonl", "valid.jsonl"], "", ["train.jsonl"]),
    "a folder per split": (["train/a.csv", "train/b.csv", "test/a.csv"], "", ["train/a.csv", "train/b.csv"]),
    "c4's names": (
        ["en/c4-train.00000-of-00002.json.gz", "en/c4-validation.00000-of-00001.json.gz"],
        "", ["en/c4-train.00000-of-00002.json.gz"],
    ),
    "shards of one split": (["data/all-00000-of-00001.parquet"], "", ["data/all-00000-of-00001.parquet"]),
    "saved to disk": (
        ["train/data-00000-of-00001.arrow", "train/state.json", "train/dataset_info.json",
         "test/data-00000-of-00001.arrow"],
        "", ["train/data-00000-of-00001.arrow"],
    ),
    "no splits": (["b.parquet", "a.parquet"], "", ["a.parquet", "b.parquet"]),
    "a licence beside data": (["a.jsonl", "LICENSE.txt", "requirements.txt"], "", ["a.jsonl"]),
    "only text": (["book.txt"], "", ["book.txt"]),
    "words inside words": (["trains.jsonl", "contest.jsonl"], "", ["contest.jsonl", "trains.jsonl"]),
    "hidden": ([".cache/a.jsonl", "a.jsonl"], "", ["a.jsonl"]),
    "outside": (["../../etc/a.jsonl", "/etc/b.jsonl", "a.jsonl"], "", ["a.jsonl"]),
    "a folder": (["en/train.csv", "en/test.csv", "fr/train.csv"], "en", ["en/train.csv"]),
    "a file": (["train.csv", "test.csv"], "test.csv", ["test.csv"]),
    "a glob": (["a/test.csv", "a/b/test.csv", "a/x.py"], "a/*", ["a/test.csv"]),
    "a deep glob": (["a/test.csv", "a/b/test.csv", "c/t.csv"], "a/**", ["a/b/test.csv", "a/test.csv"]),
    "a glob at any depth": (["t.csv", "a/t.csv", "a/b/t.csv", "u.csv"], "**/t.csv", ["a/b/t.csv", "a/t.csv", "t.csv"]),
    "a class of characters": (["a1.csv", "a2.csv", "a3.csv"], "a[!2].csv", ["a1.csv", "a3.csv"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_the_choice_of_files(case: str) -> None:
    names, path, wanted = CHOICES[case]
    address = f"{PLACE}/{path}" if path else PLACE
    assert hub.choose(names, path, None, address) == wanted


REFUSED = {
    "folders": (["en/train.csv", "fr/train.csv"], "", [f"{PLACE}/en, {PLACE}/fr"]),
    "folders below one": (["data/en/a.csv", "data/fr/a.csv"], "", [f"{PLACE}/data/en, {PLACE}/data/fr"]),
    "splits without train": (
        ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00002.parquet",
         "data/train_gen-00001-of-00002.parquet"],
        "",
        ["train_gen, train_sft", f"{PLACE}/data/train_gen-*.parquet, {PLACE}/data/train_sft-00000-of-00001.parquet"],
    ),
    "two kinds": (["train.csv", "train.parquet"], "", [".csv and as .parquet", f"{PLACE}/train.csv"]),
    "nothing to read": (["a.zip", "README.md"], "", ["README.md, a.zip", ".parquet"]),
    "a glob without files": (["a.csv"], "*.parquet", ["no data in", "a.csv"]),
    "a folder that is not there": (["a.csv"], "en", [f"no data in {PLACE}/en"]),
    "data elsewhere, and a script": (["en/a.csv", "b.py"], "de", ["E-DATA-057", "en/a.csv"]),
    "a card and a script": (["README.md", "b.py"], "", ["E-DATA-056", "script b.py"]),
    "a script by its name": (["a.csv", "a.py"], "a.py", ["E-DATA-056", "script a.py"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_is_refused_with_what_to_write(case: str) -> None:
    names, path, words = REFUSED[case]
    with pytest.raises(UserError) as refused:
        hub.choose(names, path, None, f"{PLACE}/{path}" if path else PLACE)
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)


def test_the_globs_of_a_refusal_choose_what_they_say() -> None:
    names, _, _ = REFUSED["splits without train"]
    path = "data/train_gen-*.parquet"
    assert hub.choose(names, path, None, f"{PLACE}/{path}") == [n for n in names if "_gen" in n]


CARD_FILES = ["big/0.parquet", "big/1.parquet", "small/train.parquet", "small/test.parquet"]
CARDS: dict[str, tuple[Any, list[str]]] = {
    "one path": ([{"config_name": "x", "data_files": "big/*"}], CARD_FILES[:2]),
    "a list": (
        [{"config_name": "x", "data_files": ["big/0.*", "small/train.parquet"]}],
        ["big/0.parquet", "small/train.parquet"],
    ),
    "the default": (
        [{"config_name": "big", "data_files": "big/*"},
         {"config_name": "default", "data_files": [{"split": "train", "path": ["small/train.*"]}]}],
        ["small/train.parquet"],
    ),
    "told to be the default": (
        [{"config_name": "a", "data_files": "small/*"}, {"config_name": "b", "data_files": "big/*", "default": True}],
        CARD_FILES[:2],
    ),
    "a folder": ([{"config_name": "x", "data_dir": "small"}], ["small/train.parquet"]),
    "one split": (
        [{"config_name": "x", "data_files": [{"split": "test", "path": "small/test.parquet"}]}],
        ["small/test.parquet"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CARDS)
def test_the_card_says_which_files(case: str) -> None:
    configs, wanted = CARDS[case]
    assert hub.choose(CARD_FILES, "", {"configs": configs}, PLACE) == wanted


def test_configurations_of_the_card_are_listed() -> None:
    card = {"configs": [{"config_name": name, "data_files": f"{name}/*"} for name in ("big", "small")]}
    with pytest.raises(UserError) as refused:
        hub.choose(CARD_FILES, "", card, PLACE)
    assert "big, small" in refused.value.why
    assert f"{PLACE}/big/*, {PLACE}/small/*" in refused.value.fix


@pytest.mark.parametrize(
    "text", ["# no card", "---\n: [\n---\n", "---\n- a\n---\n", "---\n" + "[" * 5000 + "\n---\n", "---\nnever closed"]
)
def test_a_card_that_says_nothing(text: str) -> None:
    assert hub.front_matter(text) is None


def test_a_card_with_windows_line_ends() -> None:
    assert hub.front_matter("---\r\nlicense: mit\r\n---\r\n# x") == {"license": "mit"}


def test_only_a_script_is_said_of_no_dataset_with_other_files() -> None:
    with pytest.raises(UserError) as refused:
        hub.choose(["README.md", "b.py"], "", None, PLACE)
    assert "only" not in refused.value.what


@pytest.mark.parametrize(
    ("place", "word"), [("spaces/acme/app", "space"), ("models/acme/m", "model"), ("buckets/acme/b", "bucket")]
)
def test_an_address_of_another_kind_is_called_by_its_kind(place: str, word: str) -> None:
    with pytest.raises(UserError) as refused:
        hub.parse(f"hf://{place}")
    assert refused.value.code == "E-DATA-036"
    assert word in refused.value.why
    assert ("model" in refused.value.why) == (word == "model")
    with pytest.raises(UserError) as model:
        hub.parse("hf://acme/tales")
    assert "model" in model.value.why
    assert "hf://datasets/acme/tales" in model.value.fix
