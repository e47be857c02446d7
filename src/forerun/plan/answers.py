"""Verdicts on several slices at once, as many compilers side by side as the machine has cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from forerun import interrupt
from forerun.plan.question import Question
from forerun.plan.verdict import Verdict, verdict

Listener = Callable[[Question, str], None]


def answers(
    questions: Sequence[Question],
    on_phase: Listener = lambda question, phase: None,
    judge: Callable[..., Verdict | None] = verdict,
) -> list[Verdict]:
    """Return verdicts in the order of the questions, without those for which `judge` returns None.

    The first failure is raised; the compilers still running are ended.
    """
    stop = threading.Event()
    workers = max(1, min(len(questions), os.cpu_count() or 1))
    with interrupt.raising(), ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            futures = [pool.submit(_ask, question, stop, on_phase, judge) for question in questions]
            for future in as_completed(futures):
                future.result()
        except BaseException:  # Ctrl-C too, which may come as early as between two of them
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [answer for future in futures if (answer := future.result()) is not None]


def _ask(
    question: Question, stop: threading.Event, on_phase: Listener, judge: Callable[..., Verdict | None]
) -> Verdict | None:
    answer = judge(question, stop, lambda phase: on_phase(question, phase))
    on_phase(question, "impossible" if answer is None else "fits" if answer.fits else "too large")
    return answer
