"""Two hosts train one real job: one is killed, then all are stopped, and the result is that of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import runs_flip
from runs import Bench
from runs_hosts import EVERY, HostsRun, announced, reference, struck

HOSTS, STEPS = 2, 40


def test_a_killed_host_and_an_announced_stop_change_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "bench", steps=STEPS, every=EVERY)
    expected = reference(bench, HOSTS)
    with HostsRun(bench, "struck", HOSTS) as job:
        # Its last steps take a minute, should the kill, and then the signal, be late.
        with bench.held_back(EVERY + 5, STEPS, step_seconds=2.0):
            job.start_all().until_step(EVERY + 3)
            killed = struck(job, "kill", 1)
            assert killed["ok"], killed
            bench.brake(2 * EVERY + 6, STEPS, step_seconds=2.0)
            job.until_step(2 * EVERY + 4)
            stopped = announced(job, "sigterm", 0)
            assert stopped["ok"], stopped
        assert job.wait() == [0, 0], job.said()
        assert expected.differs_in(job.run.outcome()) == []
        assert job.said_file(1).read_text().count("loss") == 0, "one host speaks for all"


def test_a_bit_that_flips_on_one_host_is_found_named_and_undone(tmp_path: Path) -> None:
    bench = runs_flip.bench_in(tmp_path / "bench")
    line = runs_flip.trial(bench, reference(bench, runs_flip.HOSTS), 1)
    assert line["flipped"], "else nothing is proven"
    assert (line["named"], line["exact"]) == (1, True), line
    assert 0 <= line["late_steps"] <= 2
