"""Cached log-probabilities of the reference model: damaged files are refused, and then made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forerun.run.preference_reference import read_log_probs, write_log_probs


def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    said = np.array([[1.5, -2.0], [0.25, np.nan]], np.float32)
    file = tmp_path / "train.bin"
    write_log_probs(file, said)
    raw = file.read_bytes()
    rejected = 0
    for at in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[at // 8] ^= 1 << at % 8
        file.write_bytes(damaged)
        try:
            found = read_log_probs(file, len(said))
        except ValueError:  # the caller computes it again
            rejected += 1
            continue
        assert found is not None
        assert found.tobytes() == said.tobytes()
    assert rejected > 8 * said.nbytes
