"""Verdicts on several slices at once, as many compilers side by side as the machine has cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from forerun.plan.question import Question
from forerun.plan.verdict import Verdict, verdict

Listener = Callable[[Question, str], None]


def answers(
    questions: Sequence[Question],
    on_phase: Listener = lambda question, phase: None,
    judge: Callable[..., Verdict] = verdict,
) -> list[Verdict]:
    """In the order of the questions. The first failure is raised; the compilers still running are ended."""
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=max(1, min(len(questions), os.cpu_count() or 1))) as pool:
        try:
            futures = [pool.submit(_ask, question, stop, on_phase, judge) for question in questions]
            for future in as_completed(futures):
                future.result()
        except BaseException:  # Ctrl-C too, which may come as early as between two of them
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _ask(question: Question, stop: threading.Event, on_phase: Listener, judge: Callable[..., Verdict]) -> Verdict:
    answer = judge(question, stop, lambda phase: on_phase(question, phase))
    on_phase(question, "fits" if answer.fits else "too large")
    return answer
