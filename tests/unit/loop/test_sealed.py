from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from forerun.loop.compilation import CACHE_HIT, events_counted
from forerun.loop.sealed import MAGIC, SECRET, SUFFIX, Sealed, _opened, use_sealed


def test_what_was_put_is_got_and_only_by_its_own_name(tmp_path: Path) -> None:
    cache = Sealed(tmp_path / "cache")
    cache.put("jit_step-a", b"program a")
    assert cache.get("jit_step-a") == b"program a"
    assert cache.get("jit_step-b") is None
    assert Sealed(tmp_path / "cache").get("jit_step-a") == b"program a", "another process of the same user"
    [file] = (tmp_path / "cache").glob(f"*{SUFFIX}")
    cache.put("jit_step-b", b"program b")
    other = next(one for one in (tmp_path / "cache").glob(f"*{SUFFIX}") if one != file)
    other.write_bytes(file.read_bytes())  # a sealed entry under another name
    assert cache.get("jit_step-b") is None
    assert (cache.refused, sorted(p.suffix for p in (tmp_path / "cache").iterdir())) == (1, ["", SUFFIX, SUFFIX])


def test_it_is_private(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    Sealed(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    secret = tmp_path / "cache" / SECRET
    assert secret.stat().st_mode & 0o777 == 0o600
    before = secret.read_bytes()
    secret.chmod(0o644)  # others may have read it
    Sealed(tmp_path / "cache")
    assert secret.read_bytes() != before


def test_damaged_and_foreign_entries_are_never_used(tmp_path: Path) -> None:
    """300 of them: flipped bits, zeroed pages, truncations, additions, another user's seal, no seal at all."""
    chance = random.Random(0)
    mine, foreign = Sealed(tmp_path / "mine"), Sealed(tmp_path / "foreign")
    used = 0
    for number in range(300):
        key, content = f"key {number}", chance.randbytes(chance.randrange(1, 20_000))
        mine.put(key, content)
        foreign.put(key, content)
        file = mine._file(key)
        raw = bytearray(file.read_bytes())
        at = chance.randrange(len(raw))
        kind = number % 6
        if kind == 0:
            raw[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            raw[at : at + 4096] = bytes(b ^ 0xFF for b in raw[at : at + 4096])
        elif kind == 2:
            del raw[at:]
        elif kind == 3:
            raw += b"\0"
        elif kind == 4:
            raw[:] = foreign._file(key).read_bytes()
        else:
            raw[:] = content
        file.write_bytes(raw)
        used += mine.get(key) is not None
    assert (used, mine.refused) == (0, 300)


def test_a_folder_that_cannot_be_used_is_told_and_does_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be used"):
        assert _opened(str(tmp_path / "file" / "cache")) is None


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A cache folder in JAX's settings, and JAX's own way of keeping programs back afterwards."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    plain = compilation_cache.get_file_cache
    jax.config.update(names[0], str(tmp_path / "cache"))
    jax.config.update(names[1], 0.0)
    use_sealed(tmp_path / "cache")
    yield tmp_path / "cache"
    compilation_cache.get_file_cache = plain
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_jax_compiles_again_when_an_entry_is_damaged(folder: Path) -> None:
    def run() -> tuple[float, int]:
        jax.clear_caches()
        compilation_cache.reset_cache()
        with events_counted(CACHE_HIT) as counts:
            value = float(jax.jit(lambda x: (x @ x).sum() * 3)(jnp.ones((8, 8))))
        return value, counts[CACHE_HIT]

    assert run() == (1536.0, 0)
    found = list(folder.glob(f"*{SUFFIX}"))
    assert found
    value, hits = run()
    assert value == 1536.0
    assert hits > 0
    for file in found:
        raw = bytearray(file.read_bytes())
        raw[len(MAGIC) + 40] ^= 1
        file.write_bytes(raw)
    assert run() == (1536.0, 0)
    assert run()[1] > 0, "written anew"
