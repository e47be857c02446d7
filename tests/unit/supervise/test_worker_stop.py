"""An announced stop: all hosts stop after the same unit, whoever was where when it came."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest

from forerun.supervise.protocol.messages import FromWorker, WorkerUnits
from forerun.supervise.worker_stop import Stop, Stopped, save_fits


class Said:
    """A supervisor that takes note of what it hears."""

    def __init__(self) -> None:
        self.words: list[FromWorker] = []

    def say(self, message: FromWorker) -> None:
        self.words.append(message)

    tell = say


class Host(threading.Thread):
    """A worker that does units as fast as it can; a barrier makes every unit a common one."""

    def __init__(self, barrier: threading.Barrier, pause: float) -> None:
        super().__init__(daemon=True)
        self.left = False
        self.said = Said()
        self.stop = Stop(self.said, leave=self.leave)
        self._barrier, self._pause = barrier, pause

    def run(self) -> None:
        while self.stop.go():
            time.sleep(self._pause)
            self._barrier.wait(120)

    def leave(self) -> None:
        self.left = True


@pytest.mark.timing
@pytest.mark.parametrize("seed", range(5))
def test_all_hosts_stop_after_the_same_unit(seed: int) -> None:
    """Also with hosts that wait for one another at the moment of the question."""
    chance = random.Random(seed)
    barrier = threading.Barrier(4)
    hosts = [Host(barrier, chance.random() * 0.01) for _ in range(4)]
    for host in hosts:
        host.start()
    while min(host.stop.units for host in hosts) < 3:
        time.sleep(0.001)
    for host in chance.sample(hosts, 4):
        host.stop.ask(10)
        time.sleep(chance.random() * 0.01)
    begun = [host.stop.units for host in hosts]
    time.sleep(0.02)
    assert [host.stop.units for host in hosts] == begun, "a host went on after it was asked"
    for host in chance.sample(hosts, 4):
        host.stop.decide(max(begun), True, 10)
    for host in hosts:
        host.join(120)
        assert not host.is_alive()
        assert host.stop.units == max(begun)
        assert host.stop.save
        assert next(word.units for word in host.said.words if isinstance(word, WorkerUnits)) <= max(begun)


def alone() -> tuple[Stop, list[str]]:
    left: list[str] = []
    return Stop(Said(), leave=lambda: left.append("left"), clock=lambda: 100.0), left


def test_before_the_first_unit_there_is_nothing_to_wait_for() -> None:
    stop, left = alone()
    stop.ask(30)
    stop.decide(0, True, 30)
    assert left == ["left"]


def test_after_the_first_unit_the_main_thread_decides() -> None:
    stop, left = alone()
    assert stop.go()
    stop.ask(30)
    stop.decide(1, False, 30)
    assert not stop.go()
    assert not stop.save
    assert left == []
    assert stop.remaining_seconds() == 30


def test_nothing_remains_before_a_stop() -> None:
    stop, _ = alone()
    assert stop.remaining_seconds() is None
    assert not stop.due()
    assert not stop.save


@pytest.mark.timing
def test_a_wait_for_data_ends_when_all_stop_here() -> None:
    stop, _ = alone()
    assert stop.go()
    before = signal.signal(signal.SIGUSR2, stop.interrupt)

    def leader() -> None:
        time.sleep(0.05)
        stop.ask(30)
        stop.decide(1, True, 30)

    thread = threading.Thread(target=leader)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(Stopped), stop.interrupting():
            time.sleep(120)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)
    assert time.monotonic() - began < 100


def test_a_wait_for_data_goes_on_when_another_host_is_further() -> None:
    stop, _ = alone()
    assert stop.go()
    before = signal.signal(signal.SIGUSR2, stop.interrupt)
    try:
        with stop.interrupting():
            stop.ask(30)
            stop.decide(2, True, 30)
            os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.go()
        assert not stop.go()
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({"save_seconds": 10.0, "remaining_seconds": 30.0}, True),
        ({"save_seconds": 10.0, "remaining_seconds": 15.9}, False),
        ({"save_seconds": 10.0, "remaining_seconds": 17.0, "step_seconds": 2.0}, False),
        ({"save_seconds": 0.1, "remaining_seconds": 3.0}, True),
        ({"save_seconds": None, "remaining_seconds": 3.0}, True),
        ({"save_seconds": None, "remaining_seconds": 0.5}, False),
    ],
)
def test_a_save_is_begun_only_if_it_fits(given: dict[str, Any], fits: bool) -> None:
    assert save_fits(**given) is fits
