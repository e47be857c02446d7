"""Files in stores, read through the real drivers: buckets of emulators that the test starts, and a web server.

The files are put there by plain HTTP; the drivers run in a process of their own, one for each store.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parent))
from store_server import BUCKET, WebServer, gcs_emulator, s3_emulator

PROGRAM = """
import json, sys
from forerun.data.source import sources
from forerun.data.source.files import find
from forerun.data.source.identity import identities
from forerun.errors import UserError

def rows(file):
    if file.kind in ("megatron", "datatrove"):
        columns = sources.recognise_file(file, {})
        pieces = sources.file_pieces(file, 0, 100)
        found = [row for piece in pieces for row in sources.file_rows(file, columns, piece)]
        return [{"text": row.values["input_ids"].tolist()} for row in found]
    with file.open() as opened:
        if file.kind == "parquet":
            import pyarrow.parquet
            whole = pyarrow.parquet.ParquetFile(opened)
            return [row for n in range(whole.num_row_groups) for row in whole.read_row_group(n).to_pylist()]
        return [json.loads(line) for line in opened]

def answer(place):
    try:
        return {file.name: [row["text"] for row in rows(file)] for file in find(place)}
    except UserError as error:
        return str(error)

found = {place: answer(place) for place in sys.argv[1:]}
if sys.argv[1].startswith(("gs:", "s3:")):
    found["identities"] = identities(find(sys.argv[1]))
print(json.dumps(found))
"""
LONG = "a long text " * 200_000  # three of them are beyond the drivers' block of 5 MiB
PARQUET = ["one", "two", "three", "four"]


def needs(*packages: str) -> None:
    """Skip where a driver or an emulator is missing; in CI that is a failure."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"{missing[0]} is missing, and CI must not skip this", pytrace=False)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def has_parquet() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def parquet(texts: list[str]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    body = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), body, row_group_size=2)
    return body.getvalue()


def bucket_files() -> dict[str, bytes]:
    files = {
        "rows/0.jsonl.gz": gzip.compress(jsonl("a", "b"), mtime=0),
        "rows/deep/1.jsonl.gz": gzip.compress(jsonl("c"), mtime=0),
        "rows/.hidden/2.jsonl.gz": b"not read",
        "rows-not-these/3.jsonl.gz": b"not read",
        "rows.jsonl": jsonl("beside"),
        "long.jsonl": jsonl(LONG, LONG, LONG, "end"),
        "tokens/a.bin": struct.pack("<9i", *range(9)) * 20,
        "tokens/a.idx": b"MMIDIDX\0\0"
        + struct.pack("<QBQQ20i20q21q", 1, 4, 20, 21, *[9] * 20, *range(0, 720, 36), *range(21)),
        "tokens.ds": struct.pack("<8H", *range(8)),
        "tokens.ds.index": struct.pack("<3Q", 1, 5, 8),
        "mixed/x.jsonl": jsonl("x"),
        "mixed/z.csv": b"text\nz\n",
    }
    return files | ({"table.parquet": parquet(PARQUET)} if has_parquet() else {})


def ask(places: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What `find` and `open` give or say for each place."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "GOOGLE_", "STORAGE_"))}
    source = {"PYTHONPATH": str(Path(__file__).resolve().parents[4] / "src"), "NO_PROXY": "127.0.0.1"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *places],
        env=clean | source | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


PLACES = [
    "rows", "rows/", "rows/0.jsonl.gz", "rows/*.gz", "rows/**/*.gz", "rows*", "long.jsonl", "table.parquet",
    "nowhere.jsonl", "no/*.csv", "mixed", "tokens", "tokens/*", "tokens.ds", "tokens.ds*",
]  # fmt: skip


@pytest.fixture(scope="module", params=["gs", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Place inside the bucket -> what came of it."""
    scheme: str = request.param
    needs(*{"gs": ("gcsfs", "gcp_storage_emulator"), "s3": ("s3fs", "moto")}[scheme])
    folder = tmp_path_factory.mktemp("bucket")
    with gcs_emulator(folder) if scheme == "gs" else s3_emulator() as store:
        for name, body in bucket_files().items():
            store.put(name, body)
        root = f"{scheme}://{BUCKET}/"
        elsewhere = f"{scheme}://nobucket/a.jsonl"
        answers = ask(
            [root + place for place in PLACES] + [elsewhere],
            store.environment | {"XDG_CACHE_HOME": str(folder / "cache")},
        )
    return {place.removeprefix(root): answer for place, answer in answers.items()} | {"": answers[elsewhere]}


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("rows", {"rows/0.jsonl.gz": ["a", "b"], "rows/deep/1.jsonl.gz": ["c"]}),
        ("rows/", {"rows/0.jsonl.gz": ["a", "b"], "rows/deep/1.jsonl.gz": ["c"]}),
        ("rows/0.jsonl.gz", {"rows/0.jsonl.gz": ["a", "b"]}),
        ("rows/*.gz", {"rows/0.jsonl.gz": ["a", "b"]}),
        ("rows/**/*.gz", {"rows/0.jsonl.gz": ["a", "b"], "rows/deep/1.jsonl.gz": ["c"]}),
        ("rows*", {"rows.jsonl": ["beside"]}),
        ("long.jsonl", {"long.jsonl": [LONG, LONG, LONG, "end"]}),
        ("tokens", {"tokens/a.bin": [list(range(9))] * 20}),
        ("tokens/*", {"tokens/a.bin": [list(range(9))] * 20}),
        ("tokens.ds", {"tokens.ds": [[0], [1, 2, 3, 4], [5, 6, 7]]}),
        ("tokens.ds*", {"tokens.ds": [[0], [1, 2, 3, 4], [5, 6, 7]]}),
    ],
)
def test_a_bucket_gives_what_the_place_names(bucket: dict[str, Any], place: str, wanted: dict[str, list[Any]]) -> None:
    assert bucket[place] == {f"{BUCKET}/{name}": texts for name, texts in wanted.items()}


def test_the_store_knows_what_is_in_its_files(bucket: dict[str, Any]) -> None:
    bodies = [bucket_files()[name] for name in ("rows/0.jsonl.gz", "rows/deep/1.jsonl.gz")]
    digests = [hashlib.md5(body).hexdigest() for body in bodies]
    assert [digest in identity for digest, identity in zip(digests, bucket["identities"], strict=True)] == [True, True]


def test_parquet_in_a_bucket(bucket: dict[str, Any]) -> None:
    needs("pyarrow")
    assert bucket["table.parquet"] == {f"{BUCKET}/table.parquet": PARQUET}


def test_what_is_not_in_the_bucket(bucket: dict[str, Any]) -> None:
    for place in ("nowhere.jsonl", ""):
        assert "[E-DATA-033]" in bucket[place]
    assert "[E-DATA-035]" in bucket["no/*.csv"]
    assert "of 2 kinds" in bucket["mixed"]
    assert f"://{BUCKET}/mixed/**/*" in bucket["mixed"]


def test_the_web(tmp_path: Path) -> None:
    needs("aiohttp")
    files = {"/a.jsonl": jsonl("a", "b"), "/long.jsonl": jsonl(LONG, LONG, LONG, "end")}
    files |= {"/b.jsonl.gz": gzip.compress(jsonl("c"))}
    if has_parquet():
        files["/table.parquet"] = parquet(PARQUET)
    with WebServer(files) as web:
        names = [*files, "/a.jsonl?token=x.csv", "/none.jsonl", "/closed/a.jsonl", "/whole/a.jsonl", "/*.jsonl"]
        found = ask([web.address + name for name in names], {})
        answers = {place.removeprefix(web.address): answer for place, answer in found.items()}
        assert answers["/a.jsonl"] == {f"{web.address}/a.jsonl": ["a", "b"]}
        assert answers["/a.jsonl?token=x.csv"] == {f"{web.address}/a.jsonl?***": ["a", "b"]}
        assert answers["/b.jsonl.gz"] == {f"{web.address}/b.jsonl.gz": ["c"]}
        assert answers["/long.jsonl"] == {f"{web.address}/long.jsonl": [LONG, LONG, LONG, "end"]}
        if has_parquet():
            assert answers["/table.parquet"] == {f"{web.address}/table.parquet": PARQUET}
        assert all(wanted for method, path, wanted in web.asked if method == "GET" and path in files)
    assert "[E-DATA-033]" in answers["/none.jsonl"]
    assert "[E-DATA-034]" in answers["/closed/a.jsonl"]
    assert "[E-DATA-032]" in answers["/whole/a.jsonl"]
    assert "[E-DATA-031]" in answers["/*.jsonl"]


def test_the_web_with_a_certificate(tmp_path: Path) -> None:
    needs("aiohttp")
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    pem = tmp_path / "own.pem"
    make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    own = [*make.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(pem), "-out", str(tmp_path / "c")]
    subprocess.run(["openssl", *own], check=True, capture_output=True)
    pem.write_text(pem.read_text() + (tmp_path / "c").read_text())
    with WebServer({"/a.jsonl": jsonl("a")}, certificate=pem) as web:
        place = f"{web.address}/a.jsonl"
        assert ask([place], {"SSL_CERT_FILE": str(tmp_path / "c")}) == {place: {place: ["a"]}}
        assert "certificate" in ask([place], {})[place].lower()
