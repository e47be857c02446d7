"""The host's part of the divergence guard: what happens after the devices reject a step.

- The step is tried again. A transient fault does not repeat, so the second try gives the correct result.
- If it is rejected again, the batch is skipped. The run is then the same as with data that never had the batch.
- If the next step is a spike too, the batch is not the cause: the loss is steep here. The step is taken, because a
  clipped step leads out of the steep region.
- Weights that are not finite fail on every batch. After a few consecutive rejections, the run stops.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import jax

from forerun.checkpoint.hosts import broadcast_from_first, is_first
from forerun.errors import UserError
from forerun.exit_codes import DAMAGED
from forerun.files import atomic_write, sync_folder
from forerun.journal import entry_of
from forerun.program.guard import Verdict
from forerun.program.state import Metrics
from forerun.reporter import SILENT, Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.run_folder import RunFolder
from forerun.run_folder.stored_files import SavedFiles

A_SPIKE = "a spike"
_PROOF_DIGITS = 32


class SkippedSteps:
    """The skipped steps of a run with their reasons (`known`), in the memory of a host that writes no files."""

    def __init__(self, known: dict[int, str]) -> None:
        self.known = known

    def add(self, step: int, reason: str) -> None:
        """Add a skipped step and the reason."""
        self.known[step] = reason

    def forget(self, steps: list[int]) -> None:
        """Remove these steps."""
        self.known = {step: reason for step, reason in self.known.items() if step not in steps}


class SkipFile(SkippedSteps):
    """The skipped steps of a run in the file `skips.jsonl`: one line per step, synced before the next step.

    A kill loses none of them, because `add` returns after the line is synced. Unlike the metrics, this file is an input
    of a resumed run: a skipped step must stay skipped. Each line therefore has a proof, a digest of its content keyed
    with the identity of the run. Lines that were damaged, added by hand or copied from another run have no valid proof.
    The proof detects faults. It does not stop a forger who can read the checkpoints.

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
        super().__init__({**saved, **{at: why for at, why in found.items() if at > step}})
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

    def add(self, step: int, reason: str) -> None:
        super().add(step, reason)
        with self._path.open("ab") as out:
            out.write(self._line(step, reason))
            out.flush()
            os.fsync(out.fileno())
        sync_folder(self._path.parent)

    def forget(self, steps: list[int]) -> None:
        if self.known.keys() & set(steps):
            super().forget(steps)
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


class DivergenceError(UserError):
    """Too many consecutive steps were rejected.

    A supervisor restarts the run from the newest checkpoint, which fixes a state that was damaged in memory.
    """

    exit_code = DAMAGED


class Action(Enum):
    """What the pipeline does after a try of a step.

    CONTINUE: the step was taken.
    REPLAY: run it a second time.
    SKIP: skip its batch.
    ALLOW: run it again without the check for spikes.
    """

    CONTINUE = "continue"
    REPLAY = "replay"
    SKIP = "skip"
    ALLOW = "allow"


class DivergenceGuard:
    """Decides what happens after each step. All hosts decide the same, because they read the same metrics.

    Args:
      skips: the steps of this run that were skipped so far, also by earlier processes.
      in_all: how many batches the run may skip.
      in_a_row: how many consecutive batches the run may skip.
    """

    def __init__(self, skips: SkippedSteps, *, in_all: int, in_a_row: int) -> None:
        self.skips = skips
        self._in_all, self._in_a_row = in_all, in_a_row
        self._retried: int | None = None  # the step that is being tried a second time
        self._row: list[tuple[int, str]] = []  # consecutive skipped steps up to the newest, with their reasons

    @property
    def trusts_state(self) -> bool:
        """Whether the state may be saved. False while steps are being skipped: the weights may be the cause."""
        return not self._row

    def decide(self, step: int, metrics: Metrics) -> Action:
        """Return what to do after a try of `step` with these metrics.

        Raises:
          DivergenceError: more than `in_a_row` consecutive steps were rejected.
          UserError: the run has skipped `in_all` batches already.
        """
        if metrics.verdict == Verdict.TAKEN:
            self._retried, self._row = None, []
            return Action.CONTINUE
        if metrics.verdict == Verdict.HALTED:
            raise RuntimeError(f"step {step} ran on a halted state")
        if self._retried != step:
            self._retried = step
            return Action.REPLAY
        if metrics.verdict == Verdict.SPIKE and self._skipped_spike_before(step):
            return Action.ALLOW
        self._retried = None
        reason = describe_rejection(metrics)
        self._row.append((step, reason))
        if len(self._row) > self._in_a_row:
            self.skips.forget([skipped for skipped, _ in self._row])
            raise self._diverged()
        if len(self.skips.known) >= self._in_all:
            raise self._too_many()
        self.skips.add(step, reason)
        return Action.SKIP

    def _skipped_spike_before(self, step: int) -> bool:
        """Return whether the step before this one was skipped for a spike too."""
        return bool(self._row) and self._row[-1][0] == step - 1 and self._row[-1][1].endswith(A_SPIKE)

    def known_skip(self, step: int) -> str | None:
        """Return why an earlier process skipped this step, or None if none did."""
        return self.skips.known.get(step)

    def count_known_skip(self, step: int, reason: str) -> None:
        """Count a step that an earlier process skipped as one of the consecutive skipped steps."""
        self._row.append((step, reason))

    def _diverged(self) -> DivergenceError:
        (first, what), (last, _) = self._row[0], self._row[-1]
        return DivergenceError(
            "E-RUN-030",
            f"step {first}: {what}" + (f"; and so on, every step up to {last}" if last > first else ""),
            why=f"more than {self._in_a_row} rejected steps in a row (guard.in_a_row): the weights are the cause, "
            "not a batch;\nnone of these steps was taken or saved",
            fix="lower optimizer.lr or raise optimizer.warmup and start over with --fresh (the old run is kept, "
            "renamed);\nthe same command alone resumes from the last checkpoint, which helps if memory was damaged",
        )

    def _too_many(self) -> UserError:
        step, what = self._row[-1]
        listed = ", ".join(map(str, sorted(self.skips.known))) or "none"
        return UserError(
            "E-RUN-031",
            f"step {step}: {what}; more than {self._in_all} batches would be skipped",
            why=f"skipped so far: steps {listed} (ledger.jsonl names their examples)",
            fix="fix the data, lower optimizer.lr, or allow more with guard.skips=...",
        )


def guard_of(resolved: ResolvedJob, folder: RunFolder, before: SavedFiles, reporter: Reporter) -> DivergenceGuard:
    """Return the job's guard, with the steps that earlier processes skipped.

    All hosts call this together. The first host reads the steps and sends them to the others.

    Args:
      before: what the checkpoint that the run resumes from records.
      reporter: receives warnings about a damaged file of skipped steps.
    """
    skips = SkippedSteps({})
    if is_first():
        skips = SkipFile(
            folder.skips, identity=before.identity, step=before.step, saved=before.skips, reporter=reporter
        )
    if jax.process_count() > 1:
        # Hosts can exchange only integers. The sign encodes the reason: a negative number is a spike.
        steps = [-step if why.endswith(A_SPIKE) else step for step, why in sorted(skips.known.items())]
        steps += [0] * (broadcast_from_first(len(steps)) - len(steps))
        received = [broadcast_from_first(step) for step in steps]
        known = {abs(step): f"reported by the first host{f', {A_SPIKE}' if step < 0 else ''}" for step in received}
        skips = skips if is_first() else SkippedSteps(known)
    limits = resolved.job.guard
    return DivergenceGuard(skips, in_all=limits.skips, in_a_row=limits.in_a_row)


def describe_rejection(metrics: Metrics) -> str:
    """Return the loss and the gradient norm of a rejected step, and whether they are a spike."""
    loss, norm = float(metrics.loss), float(metrics.grad_norm)
    numbers = f"loss {loss:.4g}, gradient norm {norm:.4g}"
    return f"{numbers}, {A_SPIKE}" if metrics.verdict == Verdict.SPIKE else numbers
