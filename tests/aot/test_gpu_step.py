"""The step that the GPU compiler makes: it stays on the GPUs, reuses its state, and communicates as the mesh implies.

No test runs the program. The expected bytes come from the shapes of the weights and activations, not from a compile.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod

import jax
import pytest
from tests.support.collectives import Collective, Groups, collectives, groups_of

from forerun.config.schema import Job
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.nn.sharding import SMALLEST_SPLIT
from forerun.planner.compile import compiler
from forerun.planner.compile.installed_compilers import GPU, compile_only_topology
from forerun.planner.compile.request import CompileRequest
from forerun.planner.hlo import HOST, Module, parse
from forerun.program.build import make_mesh, program_of
from forerun.resolve.resolved_job import ResolvedJob

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not any(map(find_spec, GPU.packages)), reason="jax's CUDA plugin is not installed"),
]

LAYERS, EMBED, SEQUENCE, VOCAB = 4, 512, 512, 1024
BF16, INT32 = 2, 4
TRANSFERS = ("send", "recv", "infeed", "outfeed", "send-done", "recv-done", "copy-start")
LIBRARIES = ("__cublas$", "__cudnn$", "__cub$")  # custom calls that run a kernel of a library on the GPU


@dataclass(frozen=True)
class Target:
    """A machine, and the mesh on it."""

    name: str
    mesh: MeshShape

    @property
    def tp_groups(self) -> Groups:
        """Groups of consecutive devices: `tp` is the innermost axis of the mesh."""
        devices, tp = self.mesh.devices, self.mesh.tp
        return frozenset(frozenset(range(first, first + tp)) for first in range(0, devices, tp))

    @property
    def fsdp_groups(self) -> Groups:
        """Groups of every tp-th device."""
        devices, tp = self.mesh.devices, self.mesh.tp
        return frozenset(frozenset(range(first, devices, tp)) for first in range(tp))

    @property
    def job(self) -> Job:
        shape = self.mesh
        return Job.model_validate(
            {
                "model": {"layers": LAYERS, "embed": EMBED, "heads": 8, "head_dim": 64, "vocab": VOCAB},
                "data": "nothing",
                "sequence": SEQUENCE,
                "batch": shape.data_parallel,
                "micro_batch": 1,
                "steps": 10,
                "mesh": {"data": shape.data, "fsdp": shape.fsdp, "tp": shape.tp},
                "attention": "xla",
                "remat": "full",
            }
        )


@dataclass(frozen=True)
class CompiledTarget:
    """The scheduled program of a target."""

    target: Target
    text: str
    module: Module
    collectives: list[Collective]

    def in_layers(self, kind: str, groups: Groups) -> list[Collective]:
        """Return the collectives of a kind over these groups of devices in the loops over the layers."""
        return [one for one in self.collectives if one.kind == kind and one.times > 1 and one.groups == groups]


TARGETS = (
    Target("h100-1", MeshShape(1, 1, 1)),
    Target("h100-8", MeshShape(1, 8, 1)),
    Target("h100-8", MeshShape(1, 2, 4)),
    Target("h100-8x2", MeshShape(1, 8, 2)),
)


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: f"{target.name}-{target.mesh}")
def compiled(request: pytest.FixtureRequest) -> CompiledTarget:
    """Each target's program, compiled once for all tests."""
    target: Target = request.param
    texts: list[str] = []

    def kept(text: str) -> Module:
        texts.append(text)
        return parse(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "parse", kept)
        question = CompileRequest(ResolvedJob(target.job), slice_named(target.name))
        compiler.ask(question, threading.Event(), lambda phase: None)
    module = parse(texts[-1])
    return CompiledTarget(target, texts[-1], module, collectives(module))


def test_the_step_does_not_involve_the_host(compiled: CompiledTarget) -> None:
    instructions = [x for one in compiled.module.computations.values() for x in one.instructions]
    assert len(instructions) > 1000
    assert not [x.name for x in instructions if x.op in TRANSFERS]
    assert not [x.name for x in instructions for shape in x.shapes if shape.space == HOST]
    called = set(re.findall(r'custom_call_target="([^"]*)"', compiled.text))
    assert called
    assert not [name for name in called if not name.startswith(LIBRARIES)]


def test_the_new_state_reuses_the_memory_of_the_old_one(compiled: CompiledTarget) -> None:
    program = program_of(ResolvedJob(compiled.target.job), MeshShape(1, 1, 1), jax.devices("cpu")[:1])
    leaves = len(jax.tree.leaves(program.state))  # the first arguments of the step, and its first results
    header = compiled.text.partition("\n")[0]
    aliases = re.findall(r"\{(\d+)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)
    assert [(int(result), int(argument)) for result, argument in aliases] == [(n, n) for n in range(leaves)]


def layer_weights_bytes(target: Target) -> int:
    """Return the bytes of one layer's weights in bfloat16, without those that are too small to be split."""
    program = program_of(ResolvedJob(target.job), MeshShape(1, 1, 1), jax.devices("cpu")[:1])
    sizes = [prod(leaf.shape[1:]) for leaf in jax.tree.leaves(program.state.params.blocks)]
    return BF16 * sum(size for size in sizes if size >= SMALLEST_SPLIT)


def total_bytes(found: list[Collective]) -> int:
    return sum(one.total_bytes for one in found)


def test_fsdp_gathers_weights_twice_and_scatters_gradients_once(compiled: CompiledTarget) -> None:
    mesh, weights = compiled.target.mesh, layer_weights_bytes(compiled.target)
    groups, is_split = compiled.target.fsdp_groups, mesh.fsdp > 1
    gathered, scattered = (compiled.in_layers(kind, groups) for kind in ("all-gather", "reduce-scatter"))
    # One layer's weights are less than the threshold for combining, so there is one collective per layer and pass:
    # a gather in the forward pass, a gather in the backward pass, and the reduce-scatter of the gradients.
    assert [one.times for one in gathered] == [LAYERS, LAYERS] * is_split
    assert total_bytes(gathered) == 2 * LAYERS * weights // mesh.tp * is_split
    assert [one.times for one in scattered] == [LAYERS] * is_split
    assert total_bytes(scattered) == LAYERS * weights // mesh.tp // mesh.fsdp * is_split


def test_only_small_arrays_are_all_reduced(compiled: CompiledTarget) -> None:
    """A gradient that is all-reduced and then sliced takes twice the traffic of a reduce-scatter."""
    norms = BF16 * EMBED * (2 * LAYERS + 1)
    scalars = 1024
    softmax = 4 * 4 * SEQUENCE * (compiled.target.mesh.tp > 1)  # maxima and sums over the split vocabulary
    assert total_bytes([one for one in compiled.collectives if one.kind == "all-reduce"]) <= norms + scalars + softmax


def test_tp_gathers_and_scatters_the_sequence(compiled: CompiledTarget) -> None:
    tp, activation = compiled.target.mesh.tp, BF16 * SEQUENCE * EMBED
    groups, is_split = compiled.target.tp_groups, tp > 1
    gathered, scattered = (compiled.in_layers(kind, groups) for kind in ("all-gather", "reduce-scatter"))
    # Forward: attention and MLP each gather their input and scatter their output. Backward: both inputs are gathered
    # again, and the gradients of both outputs are gathered. One scatter is recomputed (attention, whose sum with the
    # residual is the input of the MLP), and two scatter the gradients of the inputs.
    assert total_bytes(gathered) == LAYERS * (2 + 4) * activation * is_split
    assert total_bytes(scattered) == LAYERS * (2 + 3) * activation // tp * is_split


def test_tp_stays_inside_a_node(compiled: CompiledTarget) -> None:
    target, machine = compiled.target, slice_named(compiled.target.name)
    per_node = machine.devices // machine.hosts
    everyone = frozenset([frozenset(range(machine.devices))])
    crossing = {
        one.groups
        for one in compiled.collectives
        if any(len({device // per_node for device in group}) > 1 for group in one.groups)
    }
    assert crossing <= {target.fsdp_groups, everyone}
    assert bool(crossing) == (machine.hosts > 1)
    assert all(len({device // per_node for device in group}) == 1 for group in target.tp_groups)


# Runs per step, the same on both ends of jax's range. Outside the loops: the embedding and the output layer.
# With tp, each layer runs 3 + 4 all-gathers and 2 + 4 reduce-scatters in its two passes.
TP = {"all-gather": 7 * LAYERS + 3, "reduce-scatter": 6 * LAYERS + 3, "all-reduce": 6, "all-to-all": 2}
GOLDEN: dict[str, dict[str, int]] = {
    "h100-1-1x1x1": {},
    "h100-8-1x8x1": {"all-gather": 2 * LAYERS + 1, "reduce-scatter": LAYERS + 1, "all-reduce": 3, "all-to-all": 2},
    "h100-8-1x2x4": TP,
    "h100-8x2-1x8x2": TP | {"all-to-all": 3},
}


def test_golden_counts(compiled: CompiledTarget) -> None:
    counts: Counter[str] = Counter()
    for one in compiled.collectives:
        counts[one.kind] += one.times
    assert counts == GOLDEN[f"{compiled.target.name}-{compiled.target.mesh}"]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,4},{1,5}}, x", [{0, 4}, {1, 5}]),
        ("replica_groups=[2,2]<=[4], x", [{0, 1}, {2, 3}]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [{0, 2}, {1, 3}]),
        ("replica_groups=mesh['data'=1,'fsdp'=2,'tp'=2] {'fsdp'}, x", [{0, 2}, {1, 3}]),
        ("replica_groups=mesh['data'=1,'fsdp'=2,'tp'=2] {'fsdp','tp'}, x", [{0, 1, 2, 3}]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, x", [{0, 2}, {1, 3}]),
    ],
)
def test_notations_of_groups(text: str, groups: list[set[int]]) -> None:
    assert groups_of(text) == frozenset(map(frozenset, groups))


def test_plan_and_train_order_the_devices_of_nodes_equally() -> None:
    """jax lists GPUs by process and numbers them by node. The mesh follows the numbers, as in the topology of plan."""
    machine, shape = slice_named("h100-8x2"), MeshShape(1, 4, 4)
    devices = compile_only_topology(machine).devices
    planned = make_mesh(shape, devices)
    assert (make_mesh(shape, devices[::-1]).devices == planned.devices).all()
    ids = [[device.id for device in group] for group in planned.devices.reshape(-1, shape.tp)]
    assert ids == [list(range(first, first + 4)) for first in range(0, 16, 4)]
    assert [{device.process_index for device in group} for group in planned.devices.reshape(-1, shape.tp)] == [
        *[{0}] * 2,
        *[{1}] * 2,
    ]
