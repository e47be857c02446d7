"""The range of a predicted step on TPUs: the uncertain parts of its simulation.

Most parts have an uncertainty that is a share of their time. Transfers are different: they overlap with other work, so
a slower link can make a hidden transfer visible, and a faster one can hide it. The program is therefore simulated again
with slower and faster transfers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.collectives.collective_cost import OFFLOADED
from forerun.planner.time.execution import CORE, Activity, ProgramSimulation
from forerun.planner.time.simulation import Simulation
from forerun.planner.time.splash_cost import COUNTED, kernel_shape
from forerun.planner.time.step_time import (
    OWN_MODEL,
    RELATIVE,
    ROOFLINE,
    SEVERAL_SLICES,
    SPARSE_CORES,
    UNKNOWN_CHIP,
    RangeTerm,
    TimeRange,
    part_terms,
    time_range,
)

# Collectives and host transfers may take this much longer or shorter. Links: rates of published microbenchmarks against
# the data sheet, and the compiler's choice of a route. Host: PCIe is shared by the chips of a host.
COLLECTIVES_FACTOR, HOST_FACTOR = 1.35, 1.35
# Collectives on sparse cores: no microbenchmark of them is published (assumed, 2026-11).
OFFLOADED_FACTOR = 1.6
# Published runs on these chips gather weights with sparse cores. Runs on v6e only add gradients with them.
OFFLOAD_COMPARED = ("tpu7x",)
NOTABLE = 0.1  # share of the step
START_SECONDS = 2e-3  # assumed, 2026-11: time between two steps if the host cannot start the next one early
# Doubts that concern the complete step, and their effect. The range of a roofline has no end below it.
DOUBTS = {
    UNKNOWN_CHIP: RangeTerm("a generation without published runs", 1.0, 0.15, 0.25),
    OWN_MODEL: RangeTerm("a custom model", 1.0, 0.12, 0.18),
    ROOFLINE: RangeTerm("a step at the roofline", 1.0, 0.0, 0.30),
}
KINDS = {
    "matmul": "matmul",
    "memory": "memory-bound operations",
    "dma": "memory-bound operations",
    "kernels": "kernels of unknown cost",
    "network": "transfers between slices",
}
TRANSFERS = {"collectives": "collectives not hidden", "host": "host transfers not hidden"}
QUEUES = {"collectives": "ici", "host": "host"}
OFFLOADED_COLLECTIVES, GATHERS = "collectives on sparse cores", "gathers on sparse cores"
_RECOMPUTED = re.compile(r"\.remat")


def tpu_range(simulation: ProgramSimulation, step_seconds: float, doubts: Collection[str]) -> TimeRange:
    """Return the range of a step on TPUs. The arguments are those of `range_terms`."""
    assert isinstance(simulation, Simulation)
    return time_range(range_terms(simulation, step_seconds, doubts))


def tpu_doubts(simulation: ProgramSimulation, step_seconds: float) -> list[str]:
    """Return the doubts that only TPUs have: several slices, and gathers on sparse cores, whose speed is assumed."""
    assert isinstance(simulation, Simulation)
    several = [] if simulation.network is None else [SEVERAL_SLICES]
    if simulation.chip in OFFLOAD_COMPARED:
        return several
    offloaded = seconds_by_cause(simulation).get(GATHERS, 0.0)
    return [*several, SPARSE_CORES] if offloaded >= NOTABLE * step_seconds else several


def range_terms(simulation: Simulation, step_seconds: float, doubts: Collection[str] = ()) -> list[RangeTerm]:
    """Return the causes of uncertainty of a step.

    Args:
        simulation: The simulation of the program.
        step_seconds: The predicted time.
        doubts: The reasons to doubt the time.
    """
    seconds = seconds_by_cause(simulation)
    terms = part_terms({cause: seconds.get(cause, 0.0) / step_seconds for cause in RELATIVE})
    terms += transfer_terms(simulation, step_seconds, seconds.get(OFFLOADED_COLLECTIVES, 0.0))
    terms += [DOUBTS[doubt] for doubt in doubts if doubt in DOUBTS]
    terms.append(RangeTerm("the start of a short step", 1.0, 0.0, START_SECONDS / step_seconds))
    return terms


def seconds_by_cause(simulation: Simulation) -> dict[str, float]:
    """Return the seconds of a step that are subject to each cause of uncertainty: those of RELATIVE and sparse cores.

    The same second may have several causes: a recomputed matmul counts as a matmul and as recomputed.
    """
    done: dict[str, dict[str, float]] = {}

    def within(name: str) -> dict[str, float]:
        if name not in done:
            simulation.spent_in(name)
            found: defaultdict[str, float] = defaultdict(float)
            for activity in simulation.activities(name):
                if activity.called:
                    for cause, seconds in within(activity.called).items():
                        found[cause] += activity.trips * seconds
                    if activity.instruction.name in simulation.guessed_loops:
                        found["loops of unknown length"] += activity.seconds
                for cause, seconds in _causes(simulation, name, activity):
                    found[cause] += seconds
            done[name] = found
        return done[name]

    return dict(within(simulation.module.entry))


def _causes(simulation: Simulation, computation: str, activity: Activity) -> Iterator[tuple[str, float]]:
    """Yield the causes of uncertainty of one activity, with their seconds, without those of a called computation."""
    if activity.lane != CORE:
        if activity.lane.startswith("ici") and OFFLOADED in activity.instruction.attributes:
            yield OFFLOADED_COLLECTIVES, activity.seconds
            if not activity.instruction.name.startswith("all-reduce"):
                yield GATHERS, activity.seconds
        return
    if activity.called:  # only the time in which each iteration waits for its slowest queue
        inner = activity.trips * simulation.spent_in(activity.called).seconds
        if activity.kind in KINDS:
            yield KINDS[activity.kind], activity.seconds - inner
        return
    if activity.kind == "attention":
        shape = kernel_shape(simulation.module.computations[computation], activity.instruction)
        counted = shape and (simulation.chip, shape.head, shape.block, shape.kind) in COUNTED
        yield ("attention kernels" if counted else "attention kernels of another shape"), activity.seconds
    elif activity.kind in KINDS:
        yield KINDS[activity.kind], activity.seconds - activity.overhead_seconds
        yield "overheads of short operations", activity.overhead_seconds
    if _RECOMPUTED.search(activity.instruction.name):
        yield "recomputation for lack of HBM", activity.seconds


def transfer_terms(simulation: Simulation, step_seconds: float, offloaded_seconds: float = 0.0) -> list[RangeTerm]:
    """Return the terms of collectives and host transfers. A program without them has none.

    Args:
        simulation: The simulation of the program.
        step_seconds: The predicted time.
        offloaded_seconds: The time of collectives on sparse cores, hidden or not.
    """
    spent = simulation.run()
    busy = {kind: sum(spent.busy[queue] for queue in spent.busy if name in queue) for kind, name in QUEUES.items()}
    terms = []
    if busy["collectives"]:
        share = min(1.0, offloaded_seconds / busy["collectives"])
        factor = COLLECTIVES_FACTOR + share * (OFFLOADED_FACTOR - COLLECTIVES_FACTOR)
        terms.append(_transfer_term(simulation, step_seconds, "collectives", _links, factor))
    if busy["host"]:
        terms.append(_transfer_term(simulation, step_seconds, "host", _host, HOST_FACTOR))
    return terms


def _transfer_term(
    simulation: Simulation,
    step_seconds: float,
    kind: str,
    change: Callable[[ChipModel, float], ChipModel],
    factor: float,
) -> RangeTerm:
    """Return the effect of transfers that are slower or faster by `factor`."""
    spent = simulation.run()
    slower, faster = (simulation.on(change(simulation.machine, x)).run().seconds for x in (1 / factor, factor))
    shorter, longer = max(0.0, spent.seconds - faster), max(0.0, slower - spent.seconds)
    share = spent.by_kind[kind] / step_seconds
    return RangeTerm(TRANSFERS[kind], share, shorter / step_seconds, longer / step_seconds)


def _links(machine: ChipModel, factor: float) -> ChipModel:
    """Return a machine whose collectives are faster by `factor`."""
    return replace(
        machine.with_shares(link=factor),
        hop_seconds=machine.hop_seconds / factor,
        collective_seconds=machine.collective_seconds / factor,
        offload_seconds=machine.offload_seconds / factor,
    )


def _host(machine: ChipModel, factor: float) -> ChipModel:
    return machine.with_shares(host=factor)
