"""A worker for the trials with several hosts: a small deterministic training that all hosts do in step.

With `jax` the step is a real one, over jax.distributed. Without, hosts meet at a barrier at the coordinator's address,
which starts in a tenth of the time. Either way the value after step t is a function of the value before and t alone,
and host 0 saves it.
Faults that must happen inside a step are given by FAULT=kind:host:step, and happen in the first attempt only; a disk
fails in the first four. With `slow` the steps after that one take so long that nobody who acts in the midst of the run
comes too late; with `estimate` a save is said to take an hour.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from forerun.exit_codes import STOPPED, STORAGE_FAILED
from forerun.supervise.worker import Worker, connect
from forerun.supervise.worker_stop import Stopped

Step = Callable[[int, str], str]
Leave = Callable[[], None]
FULL_ATTEMPTS = 4
SLOW_SECONDS = 1.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}
CONNECT_SECONDS = 120.0
DISK_FULL = "error: the checkpoint was not saved\n  why: no space left\n  fix: make room"


def main(kind: str, folder: Path, steps: int, every: int, step_seconds: float) -> int:
    worker = connect()
    assert worker is not None
    note(folder, worker, "pid", pid=os.getpid())
    fault, host, at = (os.environ.get("FAULT", "") + "::").split(":")[:3]
    here = host in ("all", str(worker.index))
    mine, full = worker.attempt == 1 and here, fault == "disk" and here and worker.attempt <= FULL_ATTEMPTS
    worker.pulse.phase("compile")
    if mine and fault == "mistake":
        print("error: the learning rate is no number\n  why: lr: ten\n  fix: lr: 10", file=sys.stderr)
        return 2
    if full and int(at) == 0:
        print(DISK_FULL, file=sys.stderr)
        return STORAGE_FAILED
    if mine and fault == "digest":
        worker.pulse.fact("data digest", "0000")
    elif fault == "digest":
        worker.pulse.fact("data digest", "1234")
    if fault == "crash":
        raise ValueError(f"attempt {worker.attempt} came to nothing")
    if mine and fault == "compile":
        note(folder, worker, "compiling")
        time.sleep(3600)
    step, leave = jax_step(worker) if kind == "jax" else barrier_step(worker, step_seconds)
    if mine and fault == "estimate":
        worker.pulse.saved(3600.0)
    number, value = restore(folder)
    note(folder, worker, "resumed", step=number)
    stopped = False
    try:
        while number < steps:
            with worker.pulse.waiting("data"):
                if mine and fault == "data" and number + 1 == int(at):
                    note(folder, worker, "waiting", step=number + 1)
                    time.sleep(3600)
            if mine and fault == "slow" and number >= int(at):
                time.sleep(SLOW_SECONDS)
            if not worker.stop.go():
                stopped = True
                break
            if fault:
                note(folder, worker, "begun", step=number + 1)
            if mine and fault in SIGNALS and number + 1 == int(at):
                note(folder, worker, "struck", step=number + 1)
                os.kill(os.getpid(), SIGNALS[fault])
            if mine and fault == "sleep" and number + 1 == int(at):
                note(folder, worker, "asleep", step=number + 1)
                time.sleep(3600)
            if mine and fault == "loop" and number + 1 == int(at):
                note(folder, worker, "asleep", step=number + 1)
                endless()
            value = step(number + 1, value)
            number += 1
            worker.pulse.step(number)
            note(folder, worker, "step", step=number, value=value)
            if full and number == int(at):
                print(DISK_FULL, file=sys.stderr)
                os._exit(STORAGE_FAILED)
            if number % every == 0:
                save(folder, worker, number, value)
    except Stopped:
        stopped = True
    if stopped:
        if worker.stop.save:
            save(folder, worker, number, value)
        note(folder, worker, "stopped", step=number, saved=worker.stop.save)
    worker.pulse.phase("finish")
    if not stopped:
        note(folder, worker, "finished", step=number, value=value)
    leave()
    return STOPPED if stopped else 0


def note(folder: Path, worker: Worker, kind: str, **about: object) -> None:
    line = {"kind": kind, "host": worker.index, "attempt": worker.attempt, "unix_seconds": time.time(), **about}
    with (folder / f"host-{worker.index}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def save(folder: Path, worker: Worker, number: int, value: str) -> None:
    began = time.monotonic()
    if worker.index == 0:
        part = folder / "saved.part"
        part.write_text(json.dumps([number, value]))
        part.replace(folder / "saved")
    worker.pulse.saved(time.monotonic() - began)


def restore(folder: Path) -> tuple[int, str]:
    try:
        number, value = json.loads((folder / "saved").read_text())
    except FileNotFoundError:
        return 0, "0"
    return int(number), str(value)


def chained(number: int, value: str) -> str:
    return hashlib.sha256(f"{number} {value}".encode()).hexdigest()[:16]


def barrier_step(worker: Worker, step_seconds: float) -> tuple[Step, Leave]:
    """Every host sends its number to host 0 and waits until all have. Host 0 leaves last."""
    path = worker.coordinator.removeprefix("unix:")
    serving = threading.Thread(target=serve, args=(path, worker.hosts), daemon=True)
    if worker.index == 0:
        serving.start()
    deadline = time.monotonic() + CONNECT_SECONDS
    line = socket.socket(socket.AF_UNIX)
    while True:
        try:
            line.connect(path)
            break
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)

    def step(number: int, value: str) -> str:
        time.sleep(step_seconds)
        line.sendall(struct.pack("!i", number))
        if line.recv(4, socket.MSG_WAITALL) != struct.pack("!i", number):
            raise ConnectionError("Connection closed by peer")
        return chained(number, value)

    def leave() -> None:
        line.close()
        if worker.index == 0:
            serving.join()

    return step, leave


def serve(path: str, hosts: int) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(hosts)
    lines = [server.accept()[0] for _ in range(hosts)]
    while any(words := [line.recv(4, socket.MSG_WAITALL) for line in lines]):
        if not all(words):
            os._exit(1)  # as jax does when a host is gone
        for line, word in zip(lines, words, strict=True):
            line.sendall(word)


def jax_step(worker: Worker) -> tuple[Step, Leave]:
    import jax
    import numpy as np

    worker.initialize_jax()
    worker.pulse.phase("compile")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    @jax.jit
    def train(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(weights: jax.Array) -> jax.Array:
            return jax.numpy.mean((batch @ weights - 1.0) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.01 * gradient, value

    size = 16

    def step(number: int, value: str) -> str:
        weights = np.frombuffer(bytes.fromhex(value), np.float32) if value != "0" else np.zeros(size, np.float32)
        rows = np.random.default_rng(number).normal(size=(len(jax.devices()) * 2, size)).astype(np.float32)
        share = rows.reshape(worker.hosts, -1, size)[worker.index]
        batch = jax.make_array_from_process_local_data(split, share, rows.shape)
        new, _ = train(jax.device_put(weights, everywhere), batch)
        return np.asarray(new).tobytes().hex()

    return step, jax.distributed.shutdown


def endless() -> None:
    """A program that never ends, on this host alone."""
    import jax

    def go_on(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x < 2.0, lambda x: jax.numpy.sin(x), x)

    jax.block_until_ready(jax.jit(go_on)(jax.numpy.float32(1.0)))


if __name__ == "__main__":
    kind, folder, steps, every, step_seconds = sys.argv[1:]
    sys.exit(main(kind, Path(folder), int(steps), int(every), float(step_seconds)))
