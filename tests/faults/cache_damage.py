"""Damage the compile cache, or put a foreign entry there: `python tests/faults/cache_damage.py TRIALS`.

A program is compiled by jax, its entry is changed, and it is asked for again. It must be compiled anew, with the right
result, and the entry must be good afterwards. One JSON line per trial, each a function of its number.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import compilation_cache
from rig import print_lines

from forerun.run.compile_step import CACHE_HIT, SUFFIX, SealedCache, count_events, use_sealed

Bytes = bytearray


def flip(raw: Bytes, at: int, chance: random.Random, foreign: bytes) -> None:
    raw[at] ^= 1 << chance.randrange(8)


def page(raw: Bytes, at: int, chance: random.Random, foreign: bytes) -> None:
    raw[at : at + 4096] = bytes(byte ^ 0xFF for byte in raw[at : at + 4096])


def truncate(raw: Bytes, at: int, chance: random.Random, foreign: bytes) -> None:
    del raw[at:]


def extend(raw: Bytes, at: int, chance: random.Random, foreign: bytes) -> None:
    raw += chance.randbytes(1 + at % 100)


def another_seal(raw: Bytes, at: int, chance: random.Random, foreign: bytes) -> None:
    raw[:] = foreign


def no_seal(raw: Bytes, at: int, chance: random.Random, foreign: bytes) -> None:
    raw[:] = foreign[len(foreign) // 2 :]


def another_program(raw: Bytes, at: int, chance: random.Random, foreign: bytes) -> None:
    """Sealed by the same user, for another program."""


KINDS: tuple[Callable[[Bytes, int, random.Random, bytes], None], ...]
KINDS = (flip, page, truncate, extend, another_seal, no_seal, another_program)


def run(folder: Path, factor: float) -> tuple[float, bool]:
    """The program's result, and whether it came from the cache."""
    jax.clear_caches()
    compilation_cache.reset_cache()
    with count_events(CACHE_HIT) as counts:
        value = float(jax.jit(lambda x: (x @ x).sum() * factor)(jnp.ones((8, 8))))
    return value, counts[CACHE_HIT] > 0


def entries(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob(f"*{SUFFIX}")}


def trial(number: int, folder: Path) -> dict[str, Any]:
    chance = random.Random(f"cache {number}")
    mine, theirs = folder / f"{number}" / "mine", folder / f"{number}" / "theirs"
    factor = float(number + 1)
    use(theirs)
    run(theirs, factor)
    use(mine)
    run(mine, factor)
    warm = run(mine, factor)[1]
    kind = KINDS[number % len(KINDS)]
    foreign, damaged = list(entries(theirs).values()), entries(mine)
    for file, content in damaged.items():
        raw = bytearray(content)
        kind(raw, chance.randrange(len(raw)), chance, chance.choice(foreign))
        file.write_bytes(raw)
    if kind is another_program:
        for file in damaged:
            SealedCache(mine).put("another program", b"not this one")
            file.write_bytes(SealedCache(mine)._file("another program").read_bytes())
    value, used = run(mine, factor)
    again = run(mine, factor)
    return {
        "fault": "cache",
        "trial": number,
        "kind": kind.__name__,
        "entries": len(damaged),
        "used": used,
        "ok": warm and bool(damaged) and not used and value == 512.0 * factor and again == (512.0 * factor, True),
    }


def use(folder: Path) -> None:
    """Use a cache as the user to whom it belongs: each has a key."""
    os.environ["XDG_CONFIG_HOME"] = str(folder.with_name(f"config of {folder.name}"))
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()
    use_sealed(folder)


def trials(count: int) -> Iterator[dict[str, Any]]:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            yield trial(number, Path(folder))


if __name__ == "__main__":
    sys.exit(print_lines(trials(int(sys.argv[1]))))
