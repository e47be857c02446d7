"""Parallel compiles for several slices, at most one per CPU core."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from forerun import interrupt
from forerun.planner.compile.fit_result import FitResult, verdict
from forerun.planner.compile.fork_server import fork_server
from forerun.planner.compile.request import CompileRequest


def answers(
    questions: Sequence[CompileRequest],
    on_phase: Callable[[CompileRequest, str], None] = lambda question, phase: None,
    judge: Callable[..., FitResult | None] = verdict,
) -> list[FitResult]:
    """Compile several requests in parallel.

    Args:
        questions: The requests.
        on_phase: Called from worker threads with a request and its new phase.
        judge: The function that compiles one request, for example `verdict` or `cached_fit_result`.

    Returns:
        The results in the order of the requests, without those for which `judge` returns None.

    Raises:
        Exception: The first failure of `judge`. Compilers that are still running are stopped.
    """
    stop = threading.Event()
    workers = max(1, min(len(questions), os.cpu_count() or 1))
    with fork_server(), interrupt.raising(), ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            futures = [pool.submit(_ask, question, stop, on_phase, judge) for question in questions]
            for future in as_completed(futures):
                future.result()
        except BaseException:  # including Ctrl-C, which may arrive while requests are still being submitted
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [answer for future in futures if (answer := future.result()) is not None]


def _ask(
    question: CompileRequest,
    stop: threading.Event,
    on_phase: Callable[[CompileRequest, str], None],
    judge: Callable[..., FitResult | None],
) -> FitResult | None:
    answer = judge(question, stop, lambda phase: on_phase(question, phase))
    on_phase(question, "impossible" if answer is None else "fits" if answer.fits else "too large")
    return answer
