"""Counted cycles of splash attention kernels.

`bench/kernel_cycles.py` counts them in the compiler's final VLIW code. Its results are in
`bench/results/kernel_cycles.json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BlockCycles:
    """Counted cycles of one core, per block of queries and keys. About half of a causal kernel's blocks have work."""

    main: int  # of a block with work
    per_row: int  # at the begin and end of a row of blocks
    visit: int  # of every block, including skipped ones


LANES = 128  # a narrower head is padded to as many lanes
# By (chip, head, block, kernel).
COUNTED: dict[tuple[str, int, int, str], BlockCycles] = {
    ("v4", 64, 512, "forward"): BlockCycles(1731, 994, 473),
    ("v4", 64, 512, "dq"): BlockCycles(1947, 192, 486),
    ("v4", 64, 512, "dkv"): BlockCycles(2726, 618, 385),
    ("v4", 128, 512, "forward"): BlockCycles(1710, 975, 473),
    ("v4", 128, 512, "dq"): BlockCycles(1935, 175, 486),
    ("v4", 128, 512, "dkv"): BlockCycles(2688, 602, 385),
    ("v4", 256, 512, "forward"): BlockCycles(3012, 1151, 471),
    ("v4", 256, 512, "dq"): BlockCycles(3548, 367, 481),
    ("v4", 256, 512, "dkv"): BlockCycles(4388, 985, 380),
    ("v5e", 64, 512, "forward"): BlockCycles(1213, 699, 155),
    ("v5e", 64, 512, "dq"): BlockCycles(1519, 198, 137),
    ("v5e", 64, 512, "dkv"): BlockCycles(1989, 390, 161),
    ("v5e", 64, 512, "backward"): BlockCycles(2436, 390, 223),
    ("v5e", 128, 128, "forward"): BlockCycles(248, 171, 154),
    ("v5e", 128, 128, "dq"): BlockCycles(248, 44, 135),
    ("v5e", 128, 128, "dkv"): BlockCycles(242, 84, 163),
    ("v5e", 128, 256, "forward"): BlockCycles(531, 348, 155),
    ("v5e", 128, 256, "dq"): BlockCycles(505, 84, 137),
    ("v5e", 128, 256, "dkv"): BlockCycles(725, 164, 161),
    ("v5e", 128, 512, "forward"): BlockCycles(1207, 690, 155),
    ("v5e", 128, 512, "dq"): BlockCycles(1471, 164, 137),
    ("v5e", 128, 512, "dkv"): BlockCycles(1881, 326, 161),
    ("v5e", 128, 512, "backward"): BlockCycles(2450, 326, 223),
    ("v5e", 256, 512, "forward"): BlockCycles(2178, 843, 158),
    ("v5e", 256, 512, "dq"): BlockCycles(2930, 326, 140),
    ("v5e", 256, 512, "dkv"): BlockCycles(3748, 646, 166),
    ("v5p", 64, 512, "forward"): BlockCycles(1187, 704, 420),
    ("v5p", 64, 512, "dq"): BlockCycles(1549, 198, 201),
    ("v5p", 64, 512, "dkv"): BlockCycles(1964, 390, 395),
    ("v5p", 128, 128, "forward"): BlockCycles(248, 173, 284),
    ("v5p", 128, 128, "dq"): BlockCycles(241, 44, 196),
    ("v5p", 128, 128, "dkv"): BlockCycles(239, 84, 289),
    ("v5p", 128, 256, "forward"): BlockCycles(528, 351, 350),
    ("v5p", 128, 256, "dq"): BlockCycles(507, 84, 202),
    ("v5p", 128, 256, "dkv"): BlockCycles(729, 164, 290),
    ("v5p", 128, 512, "forward"): BlockCycles(1160, 693, 350),
    ("v5p", 128, 512, "dq"): BlockCycles(1505, 164, 201),
    ("v5p", 128, 512, "dkv"): BlockCycles(1870, 326, 292),
    ("v5p", 128, 512, "backward"): BlockCycles(2383, 326, 440),
    ("v5p", 256, 512, "forward"): BlockCycles(2150, 846, 354),
    ("v5p", 256, 512, "dq"): BlockCycles(3050, 326, 203),
    ("v5p", 256, 512, "dkv"): BlockCycles(3828, 646, 295),
    ("v6e", 64, 1024, "forward"): BlockCycles(3770, 702, 175),
    ("v6e", 64, 1024, "backward"): BlockCycles(6043, 516, 281),
    ("v6e", 64, 2048, "forward"): BlockCycles(15767, 1308, 240),
    ("v6e", 64, 2048, "backward"): BlockCycles(23562, 1021, 479),
    ("v6e", 128, 128, "forward"): BlockCycles(224, 78, 174),
    ("v6e", 128, 128, "backward"): BlockCycles(315, 45, 185),
    ("v6e", 128, 256, "forward"): BlockCycles(563, 162, 175),
    ("v6e", 128, 256, "backward"): BlockCycles(786, 85, 188),
    ("v6e", 128, 512, "forward"): BlockCycles(934, 340, 175),
    ("v6e", 128, 512, "dq"): BlockCycles(1084, 130, 130),
    ("v6e", 128, 512, "dkv"): BlockCycles(1314, 240, 160),
    ("v6e", 128, 512, "backward"): BlockCycles(1585, 165, 204),
    ("v6e", 128, 1024, "forward"): BlockCycles(3717, 696, 213),
    ("v6e", 128, 1024, "backward"): BlockCycles(5992, 325, 304),
    ("v6e", 128, 2048, "forward"): BlockCycles(15497, 1303, 240),
    ("v6e", 128, 2048, "dq"): BlockCycles(14808, 200, 270),
    ("v6e", 128, 2048, "dkv"): BlockCycles(17872, 500, 350),
    ("v6e", 128, 2048, "backward"): BlockCycles(22975, 662, 480),
    ("v6e", 256, 1024, "forward"): BlockCycles(3730, 829, 245),
    ("v6e", 256, 1024, "backward"): BlockCycles(6116, 662, 417),
    ("v6e", 256, 2048, "forward"): BlockCycles(15013, 1596, 371),
    ("v6e", 256, 2048, "backward"): BlockCycles(23469, 1366, 520),
    ("tpu7x", 64, 512, "forward"): BlockCycles(931, 336, 179),
    ("tpu7x", 64, 512, "dq"): BlockCycles(1064, 89, 142),
    ("tpu7x", 64, 512, "dkv"): BlockCycles(1303, 185, 176),
    ("tpu7x", 128, 512, "forward"): BlockCycles(929, 326, 179),
    ("tpu7x", 128, 512, "dq"): BlockCycles(1049, 73, 142),
    ("tpu7x", 128, 512, "dkv"): BlockCycles(1300, 153, 176),
    ("tpu7x", 128, 512, "backward"): BlockCycles(1545, 153, 201),
    ("tpu7x", 256, 512, "forward"): BlockCycles(1370, 405, 243),
    ("tpu7x", 256, 512, "dq"): BlockCycles(1195, 154, 179),
    ("tpu7x", 256, 512, "dkv"): BlockCycles(1381, 313, 279),
}


def block_cycles(chip: str, head: int, block: int, kind: str) -> BlockCycles | None:
    """Return the cycles of a kernel, or None for a chip without counted kernels.

    If the shape was not counted, the nearest counted one is scaled: the work of a block grows with its area and with
    the lanes of a head, and the work of a row with its length.
    """
    found = COUNTED.get((chip, head, block, kind))
    if found is not None:
        return found
    shapes = [(h, b) for c, h, b, k in COUNTED if (c, k) == (chip, kind)]
    if not shapes:
        return _fused(chip, head, block) if kind == "backward" else None
    lanes = LANES * math.ceil(head / LANES)
    nearest = min(shapes, key=lambda shape: (abs(math.log(shape[0] / lanes)), abs(math.log(shape[1] / block))))
    known = COUNTED[(chip, *nearest, kind)]
    length = block / nearest[1]
    wider = max(1.0, lanes / max(LANES, nearest[0]))
    return BlockCycles(
        main=round(known.main * length * length * wider), per_row=round(known.per_row * length), visit=known.visit
    )


def _fused(chip: str, head: int, block: int) -> BlockCycles | None:
    """Return the cycles of a fused backward kernel that was not counted.

    It has five of the seven matrix multiplications of the separate kernels, which both compute the scores and the
    gradient of the probabilities.
    """
    parts = [block_cycles(chip, head, block, kind) for kind in ("dq", "dkv")]
    if parts[0] is None or parts[1] is None:
        return None
    return replace(parts[1], main=round((parts[0].main + parts[1].main) * 5 / 7))
