from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from forerun.run.compile_step import (
    CACHE_HIT,
    KEY,
    MAGIC,
    SUFFIX,
    SealedCache,
    _opened,
    count_events,
    key_file,
    use_sealed,
)
from forerun.run_folder.user_key import signature, user_key


def test_what_was_put_is_got_and_only_by_its_own_name(tmp_path: Path) -> None:
    cache = SealedCache(tmp_path / "cache")
    cache.put("jit_step-a", b"program a")
    assert cache.get("jit_step-a") == b"program a"
    assert cache.get("jit_step-b") is None
    assert SealedCache(tmp_path / "cache").get("jit_step-a") == b"program a", "another process of the same user"
    [file] = (tmp_path / "cache").glob(f"*{SUFFIX}")
    cache.put("jit_step-b", b"program b")
    other = next(one for one in (tmp_path / "cache").glob(f"*{SUFFIX}") if one != file)
    other.write_bytes(file.read_bytes())  # a sealed entry under another name
    assert cache.get("jit_step-b") is None
    assert (cache.refused, sorted(p.suffix for p in (tmp_path / "cache").iterdir())) == (1, [SUFFIX, SUFFIX])


def test_the_folder_and_the_key_are_private(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    (tmp_path / "config").mkdir(mode=0o755)
    file = tmp_path / "config" / KEY
    SealedCache(tmp_path / "cache", file)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("cache", "config")] == [0o700, 0o700]
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_bytes()
    assert user_key(file) == before
    file.chmod(0o644)  # others may have read it
    assert user_key(file) != before
    file.write_bytes(b"short")
    assert len(user_key(file)) == 32


def test_the_key_is_in_the_configuration_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    SealedCache(tmp_path / "cache").put("step", b"program")
    assert key_file() == tmp_path / "config" / "forerun" / KEY
    assert key_file().exists()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [SUFFIX], "no key beside the entries"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert key_file() == tmp_path / "home" / ".config" / "forerun" / KEY


def test_an_attacker_who_can_write_the_folder_cannot_have_an_entry_loaded(tmp_path: Path) -> None:
    """All that they can do without the key: sign with their own key, and store that key in the folder too."""
    cache = SealedCache(tmp_path / "cache", tmp_path / "mine" / KEY)
    cache.put("step", b"program")
    evil = SealedCache(tmp_path / "elsewhere", tmp_path / "theirs" / KEY)
    evil.put("step", b"evil")
    cache._file("step").write_bytes(evil._file("step").read_bytes())
    for name in ("secret", KEY):  # earlier versions trusted `secret`
        (tmp_path / "cache" / name).write_bytes((tmp_path / "theirs" / KEY).read_bytes())
        (tmp_path / "cache" / name).chmod(0o600)
    again = SealedCache(tmp_path / "cache", tmp_path / "mine" / KEY)
    assert (again.get("step"), again.refused) == (None, 1)
    again.put("step", b"program")
    assert again.get("step") == b"program"


def test_entries_of_another_user_and_of_earlier_versions_are_compiled_again(tmp_path: Path) -> None:
    other = SealedCache(tmp_path / "cache", tmp_path / "other" / KEY)
    other.put("theirs", b"program")
    mine = SealedCache(tmp_path / "cache", tmp_path / "mine" / KEY)
    old = user_key(tmp_path / "cache" / "secret")  # where earlier versions had their key
    mine._file("old").write_bytes(MAGIC + signature(old, "old", b"program") + b"program")
    assert [mine.get("theirs"), mine.get("old"), mine.refused] == [None, None, 2]
    mine.put("old", b"program")
    assert mine.get("old") == b"program"


def test_a_key_inside_of_the_cache_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "cache" / "config"))
    with pytest.warns(UserWarning, match="XDG_CONFIG_HOME"):
        assert _opened(str(tmp_path / "cache")) is None


def test_damaged_and_foreign_entries_are_never_used(tmp_path: Path) -> None:
    """300 of them: flipped bits, zeroed pages, truncations, additions, another user's seal, no seal at all."""
    chance = random.Random(0)
    mine = SealedCache(tmp_path / "mine", tmp_path / "my config" / KEY)
    foreign = SealedCache(tmp_path / "foreign", tmp_path / "another config" / KEY)
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
        with count_events(CACHE_HIT) as counts:
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
