"""Datasets that are read by ranges: the same units and tokens as after a download, with a fraction of the bytes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "hub"))
from hub_server import HubServer

NAME = "acme/tales"
PLACE = f"hf://datasets/{NAME}"
FILES = [f"data/train-0000{n}-of-00002.parquet" for n in (0, 1)]
LINES = "extra/more.jsonl"
# Opens and tokenizes each place, and returns the key of its store and a digest of its units.
PROGRAM = """
import hashlib, json, sys
from pathlib import Path
from forerun.config.schema import Part
from forerun.data.source import hub
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import load_tokenizer
from forerun.data.tokens.build import build
from forerun.data.tokens.recipe import recipe_for
from forerun.errors import UserError

def answer(place, by_range, root):
    try:
        hub.DOWNLOAD_BYTES = 0 if by_range else 1 << 30  # larger datasets are read by ranges
        source = open_source(Part(path=place))
        folder = build(source, recipe_for(load_tokenizer("bytes")), Path(root), workers=1)
    except UserError as error:
        return {"code": error.code, "text": str(error)}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return {
        "key": folder.name, "digest": digest.hexdigest(), "ranges": source.is_read_by_ranges,
        "address": source.files[0].address, "texts": "".join(path.read_text(errors="replace") for path in files),
    }

print(json.dumps([answer(*each) for each in json.loads(sys.argv[1])]))
assert "jax" not in sys.modules
"""


def tokenized(asked: list[tuple[str, bool, Path]], home: Path, endpoint: str, **more: str) -> list[dict[str, Any]]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    quiet |= {"HF_HUB_ETAG_TIMEOUT": "300", "HF_HUB_DOWNLOAD_TIMEOUT": "300", "XDG_CACHE_HOME": str(home / "cache")}
    source = str(Path(__file__).resolve().parents[4] / "src")
    env = clean | quiet | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": source} | more
    given = json.dumps([(place, by_range, str(root)) for place, by_range, root in asked])
    ran = subprocess.run([sys.executable, "-c", PROGRAM, given], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    """Two files of several row groups, with a small column of texts and a large one of something else."""
    folder = tmp_path / "hub" / "datasets" / NAME
    for at, name in enumerate([*FILES, LINES]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        texts = [f"{at} {n}: it was the best of times" for n in range(400)]
        if name == LINES:
            (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            continue
        noise = [hashlib.sha512(text.encode()).digest() * 40 for text in texts]  # 2560 bytes per row, uncompressed
        table = arrow.table({"noise": noise, "text": texts, "more": noise})
        parquet.write_table(table, folder / name, row_group_size=100, compression="none", use_dictionary=False)
    return tmp_path / "hub"


def test_one_column_by_ranges_gives_the_store_of_a_download(repositories: Path, tmp_path: Path) -> None:
    size = sum((repositories / "datasets" / NAME / name).stat().st_size for name in FILES)
    here, there = tmp_path / "here", tmp_path / "there"
    with HubServer(repositories, large=FILES, gated={f"datasets/{NAME}": {"hf_good"}}) as server:
        data = f"{PLACE}/data"
        (ranged,) = tokenized([(data, True, here)], tmp_path / "a", server.endpoint, HF_TOKEN="hf_good")
        sent = server.sent_bytes
        asked = {request.token for request in server.requests if request.file}
        (loaded,) = tokenized([(data, False, there)], tmp_path / "b", server.endpoint, HF_TOKEN="hf_good")
        assert (ranged["ranges"], loaded["ranges"]) == (True, False)
        assert (ranged["key"], ranged["digest"]) == (loaded["key"], loaded["digest"])
        assert server.sent_bytes - sent >= size
        assert sent < size / 5, f"{sent} of {size} bytes"
        commit = server.commit(f"datasets/{NAME}")
        assert ranged["address"] == f"hf://datasets/{NAME}@{commit}/{FILES[0]}"
        assert asked == {"hf_good"}
        assert "hf_good" not in ranged["texts"]
        assert not list((tmp_path / "a").rglob("*.parquet")), "nothing is downloaded"
        # What was downloaded before is used.
        server.requests.clear()
        (again,) = tokenized([(data, True, tmp_path / "new")], tmp_path / "b", server.endpoint, HF_TOKEN="hf_good")
        assert (again["ranges"], again["digest"], server.fetched()) == (False, loaded["digest"], [])
        # Without access, the error is that of a download.
        (refused,) = tokenized([(data, True, tmp_path / "none")], tmp_path / "c", server.endpoint)
        assert refused["code"] == "E-HUB-022"


def test_a_small_text_file_without_a_known_checksum_and_answers_that_are_cut_off(
    repositories: Path, tmp_path: Path
) -> None:
    place = f"{PLACE}/{LINES}"
    with HubServer(repositories, cuts={LINES: [100]}) as server:
        ranged, loaded = tokenized(
            [(place, True, tmp_path / "here"), (place, False, tmp_path / "there")], tmp_path / "a", server.endpoint
        )
        assert (ranged["key"], ranged["digest"]) == (loaded["key"], loaded["digest"])
        assert (ranged["ranges"], loaded["ranges"]) == (True, False)
        assert server.cuts[LINES] == []
