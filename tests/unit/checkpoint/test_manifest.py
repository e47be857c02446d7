from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from forerun.checkpoint import manifest
from forerun.checkpoint.manifest import damage, manifest_of
from forerun.storage.folder import LocalFolder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalFolder:
    monkeypatch.setattr(manifest, "PIECE_BYTES", 1000)
    folder = tmp_path / "7-1-1"
    (folder / "state").mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, size in {"empty": 0, "one": 1, "state/exact": 2000, "state/large": 2501}.items():
        (folder / name).write_bytes(random.bytes(size))
    return LocalFolder(tmp_path)


def test_sizes_and_digests_of_every_file(place: LocalFolder) -> None:
    found = manifest_of(place, "7-1-1")
    assert {name: size for name, (size, _) in found.items()} == {
        "empty": 0,
        "one": 1,
        "state/exact": 2000,
        "state/large": 2501,
    }
    content = (place.path / "7-1-1/state/large").read_bytes()
    pieces = b"".join(xxhash.xxh3_128_digest(content[at : at + 1000]) for at in (0, 1000, 2000))
    assert found["state/large"][1] == xxhash.xxh3_128_hexdigest(pieces)
    assert damage(place, "7-1-1", found) is None


@pytest.mark.parametrize("name", ["one", "state/exact", "state/large"])
def test_what_changed_is_named(place: LocalFolder, name: str) -> None:
    found = manifest_of(place, "7-1-1")
    path = place.path / "7-1-1" / name
    content = path.read_bytes()
    for changed, what in (
        (content[:-1], "were committed"),
        (content + b"\0", "were committed"),
        (content[:-1] + bytes([content[-1] ^ 128]), "digest differs"),
    ):
        path.write_bytes(changed)
        seen = damage(place, "7-1-1", found)
        assert seen is not None
        assert (seen.file, what in seen.what) == (name, True)
    path.unlink()
    assert "is missing" in str(damage(place, "7-1-1", found))


def test_pieces_that_changed_places_show(place: LocalFolder) -> None:
    found = manifest_of(place, "7-1-1")
    path = place.path / "7-1-1/state/exact"
    content = path.read_bytes()
    path.write_bytes(content[1000:] + content[:1000])
    assert damage(place, "7-1-1", found) is not None


def test_hosts_share_the_work_and_together_see_all(place: LocalFolder) -> None:
    found = manifest_of(place, "7-1-1")
    for name in ("one", "state/exact", "state/large"):
        path = place.path / "7-1-1" / name
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        assert sum(damage(place, "7-1-1", found, (host, 3)) is not None for host in range(3)) == 1
        path.write_bytes(content)


def test_a_folder_that_is_gone_is_damage(place: LocalFolder) -> None:
    found = manifest_of(place, "7-1-1")
    place.remove("7-1-1")
    assert "is missing" in str(damage(place, "7-1-1", found))
