"""The file `skips.jsonl`: one line per skipped step with the reason, synced to the disk before the next step.

Unlike the metrics, this file is an input of a resumed run: a skipped step must stay skipped. Each line therefore has a
proof, a digest of its content keyed with the identity of the run. Lines that were damaged, added by hand or copied from
another run have no valid proof. The proof detects faults. It does not stop a forger who can read the checkpoints.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path

from forerun.files import atomic_write, sync_folder
from forerun.journal import entry_of
from forerun.reporter import SILENT, Reporter

_PROOF_DIGITS = 32


class SkipFile:
    """The skipped steps of a run (`known`). A kill loses none of them, because `add` returns after the line is synced.

    Steps up to the checkpoint's step come from the checkpoint; the file is restored from it if they differ. Later steps
    come from the file, if their proof is valid. Opening reports every other line in one message and removes it.

    Args:
        path: The file.
        identity: The identity of the run, from the log of its checkpoints.
        step: The step of the checkpoint that the run resumes from, or 0 for a new run.
        saved: The skipped steps up to `step`, from the checkpoint.
        reporter: Receives the report.
    """

    def __init__(
        self,
        path: Path,
        *,
        identity: str,
        step: int = 0,
        saved: Mapping[int, str],
        reporter: Reporter = SILENT,
    ) -> None:
        self._path, self._key = path, identity.encode()
        content = path.read_bytes() if path.exists() else b""
        *lines, _torn = content.split(b"\n")
        found, unproven, broken = self._read(lines)
        self.known = {**saved, **{at: why for at, why in found.items() if at > step}}
        report = []
        if missing := sorted(at for at, why in self.known.items() if found.get(at) != why):
            report.append(f"steps {_listed(missing)} are restored from the checkpoint of step {step}")
        if removed := sorted({*unproven, *found} - self.known.keys()):
            report.append(f"steps {_listed(removed)} are removed, because this run did not skip them")
        if broken:
            report.append(f"{broken} broken lines are removed")
        if report:
            reporter.warn(f"{path}: {'; '.join(report)}")
        if content != self._content():
            self._rewrite()

    def add(self, step: int, why: str) -> None:
        """Add a skipped step and the reason."""
        self.known[step] = why
        with self._path.open("ab") as out:
            out.write(self._line(step, why))
            out.flush()
            os.fsync(out.fileno())
        sync_folder(self._path.parent)

    def forget(self, steps: list[int]) -> None:
        """Remove these steps from the file."""
        if self.known.keys() & set(steps):
            self.known = {step: why for step, why in self.known.items() if step not in steps}
            self._rewrite()

    def _read(self, lines: list[bytes]) -> tuple[dict[int, str], list[int], int]:
        """Return the valid entries, the steps of entries without a valid proof, and the number of other lines."""
        found: dict[int, str] = {}
        unproven, broken = [], 0
        for line in lines:
            entry = entry_of(line)
            if entry is None or not isinstance(entry.get("why"), str):
                broken += 1
                continue
            step, why, proof = entry["step"], entry["why"], entry.get("proof")
            if proof == self._proof(step, why):
                found[step] = why
            else:
                unproven.append(step)
        return found, unproven, broken

    def _rewrite(self) -> None:
        atomic_write(self._path, self._content())

    def _content(self) -> bytes:
        return b"".join(self._line(step, why) for step, why in self.known.items())

    def _line(self, step: int, why: str) -> bytes:
        return json.dumps({"step": step, "why": why, "proof": self._proof(step, why)}).encode() + b"\n"

    def _proof(self, step: int, why: str) -> str:
        return hmac.new(self._key, f"{step} {why}".encode(), "sha256").hexdigest()[:_PROOF_DIGITS]


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
