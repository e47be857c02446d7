"""A lower bound of the time of a step: no chip is faster than its data sheet.

The bound is computed separately from the simulation, so that it reveals a simulated time that is too short. For each
matrix multiplication it takes the larger of two times: its FLOPs at peak, and its operands in HBM at peak bandwidth.
The bound is their sum over the program, with loops multiplied out. A TPU has no cache: an operand that the compiler
left in HBM is read again in each iteration of a loop. One that the compiler moved to on-chip memory is not counted. On
a GPU, operands may be in the L2 cache, so only bytes beyond its size count. All other operations count as zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forerun.hardware.chips import Chip
from forerun.planner.hlo import HBM, Computation, Instruction, Module
from forerun.planner.time.instruction_cost import InstructionWork
from forerun.planner.time.matrix_work import dot_product, grouped_shape, is_cublas_call
from forerun.planner.time.trip_counts import Loops

MATMULS = ("dot", "convolution")
SAME_ARRAY = ("bitcast", "convert", "copy", "reshape", "transpose")  # all of the operand is read to produce it
DEEPEST = 8


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of one JAX device."""

    flops: float
    hbm_bytes_per_second: float
    fp8_flops: float = 0.0  # of operands of 8 bits; 0: the same as `flops`
    cache_bytes: float = 0.0  # between HBM and the cores
    eight_bit_speed: float = 0.0  # TPUs: of matmuls with operands of 8 bits, relative to `flops`

    @classmethod
    def of(cls, chip: Chip) -> PeakRates:
        assert chip.hbm_bytes_per_second
        if chip.gpu is not None:
            flops = chip.bf16_flops or chip.gpu.fp16_flops or 0.0
            return cls(flops, chip.hbm_bytes_per_second, chip.gpu.fp8_flops or 0.0, chip.gpu.l2_bytes)
        assert chip.bf16_flops_per_device
        speed = (chip.int8_ops or 0.0) / chip.bf16_flops_per_device / chip.devices_per_chip
        hbm = chip.hbm_bytes_per_second / chip.devices_per_chip
        return cls(chip.bf16_flops_per_device, hbm, eight_bit_speed=max(1.0, speed))


@dataclass(frozen=True)
class TimeFloor:
    """Seconds of a lower bound, split into compute-bound and memory-bound ones."""

    compute: float = 0.0
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.memory

    def plus(self, other: TimeFloor, times: int = 1) -> TimeFloor:
        """Return this floor plus `times` x `other`."""
        return TimeFloor(self.compute + times * other.compute, self.memory + times * other.memory)


def time_floor(module: Module, roof: PeakRates) -> TimeFloor:
    """Return the least time that the program can take on one device."""
    return _Walk(module, roof).computation(module.entry)


class _Walk:
    """A traversal of a module that computes the floor of each computation once."""

    def __init__(self, module: Module, roof: PeakRates) -> None:
        self.module, self.roof = module, roof
        self._work = InstructionWork(module, eight_bit_speed=roof.eight_bit_speed or 1.0)
        self._loops = Loops(module)
        self._known: dict[str, TimeFloor] = {}

    def computation(self, name: str) -> TimeFloor:
        """Return the floor of one execution of a computation."""
        if name not in self._known:
            found = self.module.computations[name]
            total = TimeFloor()
            for x in found.instructions:
                total = total.plus(*self._instruction(found, x))
            self._known[name] = total
        return self._known[name]

    def _instruction(self, computation: Computation, x: Instruction) -> tuple[TimeFloor, int]:
        """Return (floor, number of times that it counts)."""
        if x.op == "while":
            return self.computation(x.attribute("body") or ""), self._loops.trips(computation, x)
        if x.op == "call":
            return self.computation(x.attribute("to_apply") or ""), 1
        if x.op == "custom-call" and (grouped := grouped_shape(computation, x)):
            return TimeFloor(compute=grouped.flops / self.roof.flops), 1
        if x.op != "fusion" and x.op not in MATMULS and not is_cublas_call(x):
            return TimeFloor(), 0
        count = self._work.unit_flops if self.roof.eight_bit_speed else self._work.flops
        compute = count(computation, x) / self._peak_flops(computation, x)
        moved = max(0.0, self._operand_bytes(computation, x) - self.roof.cache_bytes)
        memory = moved / self.roof.hbm_bytes_per_second
        return (TimeFloor(compute=compute) if compute >= memory else TimeFloor(memory=memory)), 1

    def _peak_flops(self, computation: Computation, x: Instruction) -> float:
        gemm = dot_product(computation, x) if self.roof.fp8_flops else None
        return self.roof.fp8_flops if gemm and gemm.eight_bits else self.roof.flops

    def _operand_bytes(self, computation: Computation, x: Instruction) -> float:
        """Return the bytes in HBM that the matrix multiplications of `x` read, each array once."""
        if x.op != "fusion":
            wanted = set(range(min(2, len(x.operands))))
        else:
            inner = self.module.computations.get(x.attribute("calls") or "")
            wanted = set(self._multiplied(inner)) if inner else set()
        names = {x.operands[number] for number in wanted if number < len(x.operands)}
        operands = (computation.by_name.get(name) for name in names)
        shapes = (shape for operand in operands if operand for shape in operand.shapes)
        return sum(shape.content_bytes for shape in shapes if shape.space == HBM)

    def _multiplied(self, fusion: Computation, depth: int = 0) -> Iterator[int]:
        """Yield the numbers of the parameters that are read completely by a matrix multiplication."""
        for x in fusion.instructions:
            if x.op in MATMULS:
                numbers = set(range(min(2, len(x.operands))))
            elif x.op == "fusion" and depth < DEEPEST:
                inner = self.module.computations.get(x.attribute("calls") or "")
                numbers = set(self._multiplied(inner, depth + 1)) if inner else set()
            else:
                continue
            for number in numbers:
                source = self._source(fusion, x.operands[number])
                if source is not None:
                    yield source

    def _source(self, computation: Computation, name: str, depth: int = 0) -> int | None:
        """Return the number of the parameter that `name` is a copy of, in any layout or type; None for other values."""
        x = computation.by_name.get(name)
        while x is not None and x.op in SAME_ARRAY:
            x = computation.operand(x, 0)
        if x is None:
            return None
        if x.op == "parameter":
            return int(x.literal)
        inner = self.module.computations.get(x.attribute("calls") or "") if x.op == "fusion" else None
        if inner is None or len(x.shapes) != 1 or depth >= DEEPEST:
            return None
        number = self._source(inner, inner.root.name, depth + 1)
        return None if number is None else self._source(computation, x.operands[number], depth + 1)
