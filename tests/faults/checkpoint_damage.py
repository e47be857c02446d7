"""Damage a committed checkpoint and see that it is found, told, and that the newest whole one is restored instead.

    python tests/faults/checkpoint_damage.py 1000           # about a minute; one JSON line per trial, then a summary

Each trial is a function of its number. What must come out is decided without the code under test: the newest
checkpoint all of whose bytes, and those of its record, equal a copy that was set aside.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.checkpoint.reader import Reader
from forerun.checkpoint.store import CheckpointStore

STEPS = (10, 20, 30)
PAGE = 4096
Random = np.random.Generator


def state_of(step: int) -> dict[str, Any]:
    """Files small and large, none of whose bytes are alike."""
    random = np.random.default_rng(step)
    shapes = {"embed": (640, 512), "layers": (4, 64, 256), "bias": (256,)}
    arrays = {name: jnp.asarray(random.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    return {"params": arrays, "mu": {name: x * 0.5 for name, x in arrays.items()}, "step": jnp.int32(step)}


LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))
WHOLE = {step: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state_of(step))] for step in STEPS}


def make(folder: Path) -> None:
    with CheckpointStore(folder, keep=len(STEPS)) as store:
        for step in STEPS:
            store.save(step, state_of(step), {"step": step})


def files_of(folder: Path, step: int) -> list[Path]:
    """Of a checkpoint made above, its record last, relative to the folder."""
    number = 2 + STEPS.index(step)
    found = [path for path in folder.glob(f"{step}-*/**/*") if path.is_file()]
    found.sort(key=lambda path: (path.stat().st_size, path.name))  # by name alone, it would be by Orbax's random ones
    return [path.relative_to(folder) for path in (*found, folder / "commits" / f"{number:012d}.json")]


def _pick(random: Random, folder: Path, names: list[Path]) -> tuple[Path, int]:
    """Uniform over the bytes."""
    sizes = np.array([(folder / name).stat().st_size for name in names])
    at = int(random.integers(sizes.sum()))
    index = int(np.searchsorted(sizes.cumsum(), at, side="right"))
    return names[index], at - int(sizes[:index].sum())


def _small(random: Random, folder: Path, names: list[Path]) -> list[Path]:
    """Half of the trials leave the large files out, which most bytes are in."""
    return [name for name in names if (folder / name).stat().st_size < 100_000] if random.random() < 0.5 else names


def flip(random: Random, folder: Path) -> Path:
    name, at = _pick(random, folder, _small(random, folder, files_of(folder, 30)))
    content = bytearray((folder / name).read_bytes())
    content[at] ^= 1 << int(random.integers(8))
    (folder / name).write_bytes(content)
    return name


def zero(random: Random, folder: Path) -> Path:
    name, at = _pick(random, folder, _small(random, folder, files_of(folder, 30)))
    content = bytearray((folder / name).read_bytes())
    start = at // PAGE * PAGE
    content[start : start + PAGE] = bytes(len(content[start : start + PAGE]))
    (folder / name).write_bytes(content)
    return name


def truncate(random: Random, folder: Path) -> Path:
    name, at = _pick(random, folder, _small(random, folder, files_of(folder, 30)))
    (folder / name).write_bytes((folder / name).read_bytes()[:at])
    return name


def remove(random: Random, folder: Path) -> Path:
    names = files_of(folder, 30)[:-1]  # a checkpoint without its record is not damaged: it does not exist
    name = names[int(random.integers(len(names)))]
    (folder / name).unlink()
    return name


def swap(random: Random, folder: Path) -> Path:
    """With another file of its own, or with one of an older checkpoint, which is damaged too then."""
    names = files_of(folder, 30)
    others = names if random.random() < 0.5 else files_of(folder, int(random.choice(STEPS[:2])))
    name, other = (these[int(random.integers(len(these)))] for these in (names, others))
    contents = (folder / name).read_bytes(), (folder / other).read_bytes()
    (folder / other).write_bytes(contents[0])
    (folder / name).write_bytes(contents[1])
    return name


KINDS: tuple[Callable[[Random, Path], Path], ...] = (flip, zero, truncate, remove, swap)


def is_complete(folder: Path, aside: Path, step: int) -> bool:
    names = files_of(aside, step)
    return all(
        (folder / name).exists() and (folder / name).read_bytes() == (aside / name).read_bytes() for name in names
    )


def trial(number: int, folder: Path, aside: Path) -> dict[str, Any]:
    random = np.random.default_rng((6, number))
    kind = KINDS[number % len(KINDS)]
    while True:  # until something has changed: a page of zeros, or one file twice, is no damage
        name = kind(random, folder)
        whole = [step for step in STEPS if is_complete(folder, aside, step)]
        if 30 not in whole:
            break
    found = Reader(folder).restore_newest(LIKE) if whole else None
    step = found.step if found else None
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found.state)] if found else None
    told = [skipped.commit for skipped in found.skipped] if found else []
    expected = max(whole, default=None)
    damaged = [2 + STEPS.index(other) for other in STEPS if expected is not None and other > expected]
    shutil.rmtree(folder)
    shutil.copytree(aside, folder)
    return {
        "trial": number,
        "kind": kind.__name__,
        "file": str(name),
        "detected": step != 30,
        "expected": expected,
        "restored": step,
        "told": sorted(told) == damaged,
        "silent": step is not None and bits != WHOLE[step],
    }


def trials(count: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder, aside = Path(name, "checkpoints"), Path(name, "aside")
        make(folder)
        shutil.copytree(folder, aside)
        for number in range(count):
            yield trial(number, folder, aside)


def is_right(result: dict[str, Any]) -> bool:
    return bool(
        result["detected"] and result["restored"] == result["expected"] and result["told"] and not result["silent"]
    )


def main() -> int:
    results = []
    for result in trials(int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
        results.append(result)
        print(json.dumps(result), flush=True)
    summary = {
        "trials": len(results),
        "kinds": Counter(result["kind"] for result in results),
        "detected": sum(result["detected"] for result in results),
        "right_fallback_and_told": sum(map(is_right, results)),
        "silent": sum(result["silent"] for result in results),
    }
    print(json.dumps(summary))
    return 0 if all(map(is_right, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
