"""Trip counts, against Python's own loops and against loops whose length is known from the model."""

from __future__ import annotations

import lzma
import operator
from pathlib import Path

import pytest

from forerun.planner.hlo import Module, parse
from forerun.planner.time.trip_counts import Loops

SAMPLES = Path(__file__).parent / "samples"
S = "s32[]{:T(128)}"
ARRAY = "f32[8,128]{1,0:T(8,128)}"
CARRY = f"({S}, {ARRAY}, {S})"


def loop(
    *,
    start: str = "%start",
    limit: int = 7,
    step: int = 1,
    direction: str = "LT",
    turn: str | None = None,
    goes_on: str | None = None,
) -> str:
    """A while over (counter, array, limit); `limit` is handed in unless the condition says otherwise."""
    turn = turn or f"  %more = {S} constant({step})\n  %next = {S} add(%i, %more)"
    goes_on = goes_on or f"  ROOT %go = pred[]{{:T(512)}} compare(%i, %l), direction={direction}"
    return f"""HloModule m

%plus (a: s32[], b: s32[]) -> s32[] {{
  %a = {S} parameter(0)
  %b = {S} parameter(1)
  ROOT %sum = {S} add(%b, %a)
}}

%below (b: s32[], a: s32[]) -> pred[] {{
  %a = {S} parameter(1)
  %b = {S} parameter(0)
  ROOT %lt = pred[]{{:T(512)}} compare(%b, %a), direction=LT
}}

%condition (p: {CARRY}) -> pred[] {{
  %p = {CARRY} parameter(0)
  %i = {S} get-tuple-element(%p), index=0
  %l = {S} get-tuple-element(%p), index=2
{goes_on}
}}

%body (p: {CARRY}) -> {CARRY} {{
  %p = {CARRY} parameter(0)
  %i = {S} get-tuple-element(%p), index=0
  %x = {ARRAY} get-tuple-element(%p), index=1
  %l = {S} get-tuple-element(%p), index=2
  %kept = {S} copy(%l)
{turn}
  ROOT %t = {CARRY} tuple(%next, %x, %kept)
}}

ENTRY %main (x: f32[8,128], given: s32[]) -> f32[8,128] {{
  %x = {ARRAY} parameter(0)
  %given = {S} parameter(1)
  %start = {S} constant(0)
  %five = {S} constant(5)
  %limit = {S} constant({limit})
  %carry = {CARRY} tuple({start}, %x, %limit)
  %w = {CARRY} while(%carry), condition=%condition, body=%body
  ROOT %y = {ARRAY} get-tuple-element(%w), index=1
}}
"""


def trips(text: str, name: str = "w", computation: str = "main") -> tuple[int, list[str]]:
    module = parse(text)
    loops = Loops(module)
    within = module.computations[computation]
    return loops.trips(within, within.by_name[name]), loops.guessed


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("limit", [5, 7, 28, 32])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_upwards_like_range(start: int, limit: int, step: int) -> None:
    text = loop(start="%five" if start else "%start", limit=limit, step=step)
    assert trips(text) == (len(range(start, limit, step)), [])


@pytest.mark.parametrize(
    ("direction", "goes_on", "limit", "step"),
    [
        ("LE", operator.le, 9, 2),
        ("LE", operator.le, 8, 2),
        ("GT", operator.gt, -9, -2),
        ("GT", operator.gt, -8, -2),
        ("GE", operator.ge, -9, -3),
        ("NE", operator.ne, 14, 7),
    ],
)
def test_other_directions(direction: str, goes_on: object, limit: int, step: int) -> None:
    assert callable(goes_on)
    counter = turns = 0
    while goes_on(counter, limit):
        counter, turns = counter + step, turns + 1
    assert trips(loop(limit=limit, step=step, direction=direction)) == (turns, [])


def test_two_turns_unrolled_into_one() -> None:
    turn = f"  %one = {S} constant(1)\n  %half = {S} add(%i, %one)\n  %next = {S} add(%one, %half)"
    assert trips(loop(limit=9, turn=turn)) == (5, [])


def test_counter_and_condition_in_fusions() -> None:
    turn = f"  %two = {S} constant(2)\n  %next = {S} fusion(%two, %i), kind=kLoop, calls=%plus"
    goes_on = "  ROOT %go = pred[]{:T(512)} fusion(%i, %l), kind=kLoop, calls=%below"
    assert trips(loop(limit=12, turn=turn, goes_on=goes_on)) == (6, [])


def test_limit_in_the_condition() -> None:
    goes_on = f"  %n = {S} constant(28)\n  ROOT %go = pred[]{{:T(512)}} compare(%i, %n), direction=LT"
    assert trips(loop(goes_on=goes_on)) == (28, [])


def test_what_the_compiler_knows_goes_first() -> None:
    known = 'body=%body, backend_config={"known_trip_count":{"n":"11"}}'
    assert trips(loop().replace("body=%body", known)) == (11, [])


def test_a_loop_that_depends_on_data_is_a_guess_and_says_so() -> None:
    assert trips(loop(start="%given")) == (1, ["w"])
    goes_on = f"  %n = {S} constant(6)\n  ROOT %go = pred[]{{:T(512)}} compare(%i, %n), direction=LT"
    assert trips(loop(start="%given", goes_on=goes_on)) == (6, ["w"])


def test_elements_named_by_a_hash() -> None:
    text = loop(limit=12, step=4)
    for name, element in (("i", 0), ("x", 1), ("l", 2)):
        text = text.replace(f"(%{name},", f"(%p#{element},").replace(f", %{name},", f", %p#{element},")
        text = text.replace(f", %{name})", f", %p#{element})").replace(f"copy(%{name})", f"copy(%p#{element})")
    text = "\n".join(line for line in text.splitlines() if "= " + S + " get-tuple-element" not in line)
    text = "\n".join(line for line in text.splitlines() if "get-tuple-element(%p)" not in line)
    text = text.replace("tuple(%start, %p#1, %limit)", "tuple(%start, %x, %limit)")
    assert "%p#2" in text
    assert trips(text) == (3, [])


NESTED = f"""HloModule m

%in_condition (p: ({S}, {S})) -> pred[] {{
  %p = ({S}, {S}) parameter(0)
  %j = {S} get-tuple-element(%p), index=0
  %m = {S} get-tuple-element(%p), index=1
  ROOT %go = pred[]{{:T(512)}} compare(%j, %m), direction=LT
}}

%in_body (p: ({S}, {S})) -> ({S}, {S}) {{
  %p = ({S}, {S}) parameter(0)
  %j = {S} get-tuple-element(%p), index=0
  %m = {S} get-tuple-element(%p), index=1
  %two = {S} constant(2)
  %next = {S} add(%j, %two)
  ROOT %t = ({S}, {S}) tuple(%next, %m)
}}

%out_condition (p: {CARRY}) -> pred[] {{
  %p = {CARRY} parameter(0)
  %i = {S} get-tuple-element(%p), index=0
  %n = {S} constant(4)
  ROOT %go = pred[]{{:T(512)}} compare(%i, %n), direction=LT
}}

%out_body (p: {CARRY}) -> {CARRY} {{
  %p = {CARRY} parameter(0)
  %i = {S} get-tuple-element(%p), index=0
  %x = {ARRAY} get-tuple-element(%p), index=1
  %m = {S} get-tuple-element(%p), index=2
  %zero = {S} constant(0)
  %one = {S} constant(1)
  %in = ({S}, {S}) tuple(%zero, %m)
  %inner = ({S}, {S}) while(%in), condition=%in_condition, body=%in_body
  %m_again = {S} get-tuple-element(%inner), index=1
  %again = ({S}, {S}) tuple(%zero, %m_again)
  %second = ({S}, {S}) while(%again), condition=%in_condition, body=%in_body
  %slid = ({S}, {S}) tuple(%i, %m)
  %triangle = ({S}, {S}) while(%slid), condition=%in_condition, body=%in_body
  %next = {S} add(%i, %one)
  ROOT %t = {CARRY} tuple(%next, %x, %m)
}}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {{
  %x = {ARRAY} parameter(0)
  %start = {S} constant(0)
  %limit = {S} constant(7)
  %carry = {CARRY} tuple(%start, %x, %limit)
  %w = {CARRY} while(%carry), condition=%out_condition, body=%out_body
  ROOT %y = {ARRAY} get-tuple-element(%w), index=1
}}
"""


def test_a_limit_from_around_the_outer_loop() -> None:
    assert trips(NESTED) == (4, [])
    assert trips(NESTED, "inner", "out_body") == (len(range(0, 7, 2)), [])
    assert trips(NESTED, "second", "out_body") == (len(range(0, 7, 2)), []), "handed through the first one"


def test_a_start_that_moves_with_the_outer_loop_is_not_taken_for_a_constant() -> None:
    assert trips(NESTED, "triangle", "out_body")[1] == ["triangle"]


@pytest.fixture(scope="module")
def tpu7x() -> Module:
    """Qwen3-0.6B on 4 chips of tpu7x, 4 x 1024 a device: 28 layers, and the loss in 8 chunks of 128 positions."""
    return parse(lzma.decompress((SAMPLES / "qwen3_06b_tpu7x.txt.xz").read_bytes()).decode())


def test_loops_of_a_real_program(tpu7x: Module) -> None:
    loops = Loops(tpu7x)
    found = [
        (x.attribute("body") or "", loops.trips(computation, x))
        for computation in tpu7x.computations.values()
        for x in computation.instructions
        if x.op == "while"
    ]
    assert sorted(n for body, n in found if "windowed" not in body) == [8, 28, 28]
    assert {n for body, n in found if "windowed" in body} == {8 // 2 // 2}, "8 devices, both ways round, two at a time"
    assert loops.guessed == []
