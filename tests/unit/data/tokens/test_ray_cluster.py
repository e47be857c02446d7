"""The engine of a Ray cluster without a cluster: what is sent, what a node checks, and what follows from a loss.

`Ray` stands for the library. tests/faults/test_ray.py uses a real cluster.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_tokenizers import byte_level, saved

from forerun.config.schema import Part
from forerun.data.source.sources import Source, open_source
from forerun.data.tokenizer import load_tokenizer
from forerun.data.tokens import ray_cluster, unit, worker_pool
from forerun.data.tokens.build import build
from forerun.data.tokens.ray_cluster import LOSSES, RayEngine
from forerun.data.tokens.recipe import Recipe, recipe_for
from forerun.errors import UserError


class RayError(Exception):
    """A failure of the system, such as a lost node."""


class RayTaskError(RayError):
    cause = ZeroDivisionError("no such thing")


class OutOfMemoryError(RayError):
    pass


class Task:
    """A task that runs in this process. `lose` is called before each message, and may raise."""

    def __init__(self, messages: Iterator[Any], lose: Callable[[], None]) -> None:
        self._messages, self._lose = messages, lose

    def __next__(self) -> Any:
        message = next(self._messages)
        return self._lose, message


class Ray:
    """The functions of Ray that the engine uses, for one node with two cores that is this process."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, OutOfMemoryError=OutOfMemoryError)

    def __init__(self, lose: Callable[[dict[str, Any]], None] = lambda unit: None) -> None:
        self._lose = lose
        self.sent: list[Any] = []
        self.started: list[int] = []
        self.cancelled = 0

    def put(self, value: Any) -> Any:
        self.sent.append(value)
        return SimpleNamespace(value=value)

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        def made(function: Any) -> Any:
            task = SimpleNamespace(options=lambda **more: task)
            task.remote = self._start if options.get("num_returns") == "streaming" else self._check
            return task

        return made

    def _start(self, key: str, shipped: list[Any], values: dict[str, Any], seconds: float) -> Task:
        self.sent.append(values)
        self.started.append(values["number"])
        messages = ray_cluster.build_unit(key, lambda: shipped[0].value, values, seconds)
        return Task(messages, lambda: self._lose(values))

    def _check(self, shipped: list[Any]) -> str:
        self.problem = ray_cluster.node_problem(shipped[0].value)
        return "check"

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}, "NodeID": "1", "NodeManagerHostname": "here"}]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def wait(self, tasks: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return tasks[:num_returns], tasks[num_returns:]

    def get(self, message: Any) -> Any:
        if message == "check":
            return self.problem
        lose, content = message
        lose()
        return content

    def cancel(self, task: Any) -> None:
        self.cancelled += 1


@pytest.fixture(autouse=True)
def _strategies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", module)
    monkeypatch.setattr(unit, "unit_bytes", lambda total: 600)
    # All tasks are in this process, which has one worker: a unit must end before the next one begins.
    monkeypatch.setattr(ray_cluster, "LEAST_REPORT_SECONDS", 1e9)
    yield
    ray_cluster._forget()


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "data").mkdir()
    text = "".join(json.dumps({"text": f"row {number} " + "words " * 20}) + "\n" for number in range(1, 40))
    (tmp_path / "data" / "a.jsonl").write_text(text)
    return open_source(Part(path=str(tmp_path / "data")))


@pytest.fixture
def recipe() -> Recipe:
    return recipe_for(load_tokenizer("bytes"))


def contents(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


def test_the_store_is_that_of_the_pool_with_a_tokenizer_that_the_node_does_not_have(
    source: Source, tmp_path: Path
) -> None:
    recipe = Recipe(saved(byte_level(), tmp_path), "digest", 0, 1000)
    build(source, recipe, tmp_path / "pool", workers=1)
    raw = Path(recipe.tokenizer).read_bytes()
    ray = Ray()

    def moved(shipment: Any) -> Any:  # after the driver has read it, the file is gone
        Path(recipe.tokenizer).unlink(missing_ok=True)
        ray.sent.append(shipment)
        return SimpleNamespace(value=shipment)

    ray.put = moved  # type: ignore[method-assign]
    build(source, recipe, tmp_path / "ray", engine=partial(RayEngine, ray))
    assert ray.sent[0].tokenizer == raw
    assert ray.started == sorted(ray.started)
    assert len(ray.started) > 5
    assert contents(tmp_path / "ray") == contents(tmp_path / "pool")


def test_a_lost_node_costs_only_the_time_of_its_unit(source: Source, recipe: Recipe, tmp_path: Path) -> None:
    lost = []

    def lose(values: dict[str, Any]) -> None:
        if values["number"] in (1, 2) and lost.count(values["number"]) < LOSSES - 1:
            lost.append(values["number"])
            raise RayError("the node is dead")

    build(source, recipe, tmp_path / "pool", workers=1)
    build(source, recipe, tmp_path / "ray", engine=partial(RayEngine, Ray(lose)))
    assert len(lost) == 2 * (LOSSES - 1)
    assert contents(tmp_path / "ray") == contents(tmp_path / "pool")


@pytest.mark.parametrize(
    ("error", "times", "code"), [(RayError, LOSSES, "E-DATA-201"), (OutOfMemoryError, 3, "E-DATA-086")]
)
def test_a_unit_that_is_always_lost_is_an_error(
    source: Source, recipe: Recipe, tmp_path: Path, error: type[Exception], times: int, code: str
) -> None:
    def lose(values: dict[str, Any]) -> None:
        if values["number"] == 2:
            raise error("lost")

    ray = Ray(lose)
    with pytest.raises(UserError) as caught:
        build(source, recipe, tmp_path / "ray", engine=partial(RayEngine, ray))
    assert caught.value.code == code
    assert ray.started.count(2) == times


def test_a_bug_on_a_node_is_reported(source: Source, recipe: Recipe, tmp_path: Path) -> None:
    def lose(values: dict[str, Any]) -> None:
        raise RayTaskError("trace")

    with pytest.raises(RuntimeError, match="ZeroDivisionError: no such thing"):
        build(source, recipe, tmp_path / "ray", engine=partial(RayEngine, Ray(lose)))


def test_the_earliest_bad_row_is_reported_and_later_units_are_cancelled(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": f"row {number} " + "words " * 20}) for number in range(1, 40)]
    rows[20] = rows[30] = "{}"
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(rows) + "\n")
    found = open_source(Part(path=str(tmp_path / "data")))
    errors = []
    ray = Ray()
    for engine in ({}, {"engine": partial(RayEngine, ray)}):
        with pytest.raises(UserError) as caught:
            build(found, recipe, tmp_path / f"s{len(errors)}", workers=4, **engine)
        errors.append(caught.value.parts())
    assert errors[0] == errors[1]
    assert "line 21" in str(errors[0])
    assert ray.cancelled > 0
    assert not list((tmp_path / "s1").glob("*/cluster.*"))


@pytest.mark.parametrize(("number", "memory"), [(signal.SIGKILL, "E-DATA-086"), (signal.SIGSEGV, "E-DATA-087")])
def test_a_process_that_dies_on_a_node_has_the_code_of_the_pool(
    source: Source, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, memory: str
) -> None:
    monkeypatch.setattr(worker_pool, "WORKER", ("-c", f"import os; os.kill(os.getpid(), {int(number)})"))
    with pytest.raises(UserError) as caught:
        build(source, recipe, tmp_path / "s", workers=1, engine=partial(RayEngine, Ray()))
    assert caught.value.code == memory
    assert f"signal {int(number)}" in caught.value.why


def shipment(source: Source, recipe: Recipe, store: Path) -> ray_cluster.Shipment:
    task = {"source": source.to_json(), "recipe": recipe.to_json(), "store": str(store)}
    store.mkdir()
    (store / "marker").write_text("key")
    return ray_cluster.Shipment("key", task, None, "marker", str(store.parent), ray_cluster.versions())


def test_a_node_must_see_the_store_and_the_data_and_have_the_same_versions(
    source: Source, recipe: Recipe, tmp_path: Path
) -> None:
    good = shipment(source, recipe, tmp_path / "store")
    assert ray_cluster.node_problem(good) is None
    other_version = replace(good, versions=good.versions | {"tokenizers": "0.0.1"})
    other_store = replace(good, task=good.task | {"store": str(tmp_path / "elsewhere")})
    gone = good.task["source"] | {"files": [[str(tmp_path / "gone.jsonl"), "jsonl", ""]]}
    other_data = replace(good, task=good.task | {"source": gone})
    found = [
        ray_cluster.node_problem(one) for one in (other_version, other_store, replace(good, key="other"), other_data)
    ]
    assert [one and one["code"] for one in found] == ["E-DATA-197", "E-DATA-198", "E-DATA-198", "E-DATA-199"]


def test_a_name_is_relative_to_the_folder_of_the_driver(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    relative = Source.from_json({"files": [["a.jsonl", "jsonl", ""]], "form": "text", "columns": {}})
    good = shipment(relative, recipe, tmp_path / "store")
    assert ray_cluster.node_problem(good) is None
    assert (ray_cluster.node_problem(replace(good, folder="/nowhere")) or {})["code"] == "E-DATA-199"


def test_a_node_that_does_not_see_the_store_ends_the_build_before_its_work(
    source: Source, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_store_problem", lambda store, shipment: "it is missing")
    ray = Ray()
    with pytest.raises(UserError) as caught:
        build(source, recipe, tmp_path / "s", engine=partial(RayEngine, ray))
    assert (caught.value.code, ray.started) == ("E-DATA-198", [])
    assert not contents(tmp_path / "s")


def test_no_secret_is_sent(source: Source, recipe: Recipe, tmp_path: Path) -> None:
    task = shipment(source, recipe, tmp_path / "store").task
    address = "https://example.com/a.jsonl?signature=secret"
    task = task | {"source": task["source"] | {"files": [[address, "jsonl", ""]]}}
    ray = Ray()
    engine = partial(RayEngine, ray)([], task, None)
    with pytest.raises(UserError) as caught:
        list(engine.events())
    assert caught.value.code == "E-DATA-202"
    assert "secret" not in str(caught.value) + str(caught.value.parts())
    assert ray.sent == []


def test_ray_that_is_missing_and_addresses_that_do_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError) as caught, ray_cluster.ray_cluster("auto"):
        pass
    codes.append(caught.value.code)
    assert "ray" in caught.value.fix

    def refused(**options: Any) -> None:
        raise ConnectionError("nothing answers")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=refused))
    for address in ("ray://head:10001", "auto"):
        with pytest.raises(UserError) as caught, ray_cluster.ray_cluster(address):
            pass
        codes.append(caught.value.code)
    assert codes == ["E-DATA-195", "E-DATA-203", "E-DATA-204"]
    assert signal.getsignal(signal.SIGTERM) is before
