"""Random scheduled modules of a TPU program, with the FLOPs and HBM bytes that each must take.

The generator counts its work itself, from the dimensions that it draws. It uses nothing of the step-time model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SIZES = (8, 64, 128, 200, 512, 1024, 2048, 4096)
ITEM_BYTES = {"bf16": 2, "f32": 4}
TILES = {"bf16": "T(8,128)(2,1)", "f32": "T(8,128)"}
DEEPEST = 2
FLAG = "u32[]{:S(2)}"


@dataclass(frozen=True)
class Array:
    name: str
    dtype: str
    rows: int
    columns: int
    near: bool  # in on-chip memory instead of HBM

    @property
    def shape(self) -> str:
        return f"{self.dtype}[{self.rows},{self.columns}]{{1,0:{TILES[self.dtype]}{'S(1)' if self.near else ''}}}"

    @property
    def hbm_bytes(self) -> int:
        return 0 if self.near else self.rows * self.columns * ITEM_BYTES[self.dtype]


@dataclass
class Work:
    """Matrix FLOPs and bytes that cross the interface of HBM."""

    flops: int = 0
    hbm_bytes: int = 0

    def add(self, flops: int = 0, hbm_bytes: int = 0) -> None:
        self.flops += flops
        self.hbm_bytes += hbm_bytes


@dataclass
class RandomModule:
    """A module that is drawn from a seed: `text` is its HLO, and `work` its least work."""

    seed: int
    work: Work = field(init=False)
    text: str = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.count = 0
        self.computations: list[str] = []
        lines: list[str] = []
        arrays = [self.array(lines, f"parameter({n})", near=False) for n in range(self.draw.randint(2, 4))]
        self.work = self.block(lines, arrays, 0)
        body = "\n".join(lines)
        self.text = (
            "HloModule m, is_scheduled=true\n\n"
            + "\n".join(self.computations)
            + f"\nENTRY %main () -> () {{\n{body}\n  ROOT %done = () tuple()\n}}\n"
        )

    def name(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}.{self.count}"

    def size(self) -> int:
        return self.draw.choice(SIZES)

    def array(self, lines: list[str], expression: str, near: bool | None = None) -> Array:
        near = self.draw.random() < 0.3 if near is None else near
        found = Array(self.name(), self.draw.choice(("bf16", "f32")), self.size(), self.size(), near)
        lines.append(f"  %{found.name} = {found.shape} {expression}")
        return found

    def block(self, lines: list[str], arrays: list[Array], depth: int) -> Work:
        """Append random instructions to `lines` and return their work."""
        work = Work()
        kinds = [self.matmul, self.elementwise, self.reduction, self.slice, self.update, self.prefetch]
        for _ in range(self.draw.randint(1, 6)):
            if depth < DEEPEST and self.draw.random() < 0.2:
                self.loop(lines, arrays, depth, work)
            else:
                self.draw.choice(kinds)(lines, arrays, work)
        return work

    def result(self, rows: int, columns: int) -> Array:
        return Array(self.name(), self.draw.choice(("bf16", "f32")), rows, columns, self.draw.random() < 0.4)

    def fused(self, lines: list[str], operands: list[Array], out: Array, inside: str, *extra: str) -> None:
        """Append a fusion of one instruction, in which the operands are called a, b and so on."""
        inner = self.name("fused")
        names = "abcd"[: len(operands)]
        parameters = "".join(f"  %{names[i]} = {x.shape} parameter({i})\n" for i, x in enumerate(operands))
        head = ", ".join(f"{n}: {x.shape}" for n, x in zip(names, operands, strict=True))
        more = "".join(f"  {line}\n" for line in extra)
        self.computations.append(
            f"%{inner} ({head}) -> {out.shape} {{\n{parameters}{more}  ROOT %r = {out.shape} {inside}\n}}\n"
        )
        given = ", ".join(f"%{x.name}" for x in operands)
        lines.append(f"  %{out.name} = {out.shape} fusion({given}), kind=kOutput, calls=%{inner}")

    def matmul(self, lines: list[str], arrays: list[Array], work: Work) -> None:
        left = self.draw.choice(arrays)
        right = Array(self.name(), "bf16", left.columns, self.size(), self.draw.random() < 0.4)
        lines.append(f"  %{right.name} = {right.shape} parameter({self.count})")
        out = self.result(left.rows, right.columns)
        if self.draw.random() < 0.5:
            self.fused(lines, [left, right], out, "convolution(%a, %b), dim_labels=bf_io->bf")
        else:
            dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
            lines.append(f"  %{out.name} = {out.shape} dot(%{left.name}, %{right.name}), {dims}")
        work.add(2 * left.rows * left.columns * right.columns, left.hbm_bytes + right.hbm_bytes + out.hbm_bytes)
        arrays.append(out)

    def elementwise(self, lines: list[str], arrays: list[Array], work: Work) -> None:
        source = self.draw.choice(arrays)
        out = self.result(source.rows, source.columns)
        op = self.draw.choice(("negate", "exponential", "sqrt", "convert"))
        self.fused(lines, [source], out, f"{op}(%a)")
        work.add(hbm_bytes=source.hbm_bytes + out.hbm_bytes)
        arrays.append(out)

    def reduction(self, lines: list[str], arrays: list[Array], work: Work) -> None:
        source = self.draw.choice(arrays)
        out = f"f32[{source.rows}]{{0:T(1024)}}"
        name = self.name()
        lines.append(f"  %{name}.z = f32[] constant(0)")
        lines.append(f"  %{name} = {out} reduce(%{source.name}, %{name}.z), dimensions={{1}}, to_apply=%add")
        work.add(hbm_bytes=source.hbm_bytes + 4 * source.rows)

    def slice(self, lines: list[str], arrays: list[Array], work: Work) -> None:
        source = self.draw.choice(arrays)
        out = Array(self.name(), source.dtype, self.draw.randint(1, source.rows), source.columns, True)
        zero = "%z = s32[] constant(0)"
        sizes = f"dynamic_slice_sizes={{{out.rows},{out.columns}}}"
        self.fused(lines, [source], out, f"dynamic-slice(%a, %z, %z), {sizes}", zero)
        work.add(hbm_bytes=0 if source.near else out.rows * out.columns * ITEM_BYTES[out.dtype])

    def update(self, lines: list[str], arrays: list[Array], work: Work) -> None:
        """Append an update in place, which reads and writes only the update."""
        target = self.draw.choice(arrays)
        part = Array(self.name(), target.dtype, self.draw.randint(1, target.rows), target.columns, False)
        lines.append(f"  %{part.name} = {part.shape} parameter({self.count})")
        out = Array(self.name(), target.dtype, target.rows, target.columns, target.near)
        self.fused(lines, [target, part], out, "dynamic-update-slice(%a, %b, %z, %z)", "%z = s32[] constant(0)")
        work.add(hbm_bytes=part.hbm_bytes * (1 if target.near else 2))

    def prefetch(self, lines: list[str], arrays: list[Array], work: Work) -> None:
        """Append a copy into on-chip memory. It is awaited immediately, after other work, or by another iteration."""
        source = self.draw.choice([x for x in arrays if not x.near])
        near = Array(self.name(), source.dtype, source.rows, source.columns, True)
        lines.append(f"  %{near.name}.s = ({near.shape}, {source.shape}, {FLAG}) copy-start(%{source.name})")
        work.add(hbm_bytes=source.hbm_bytes)
        when = self.draw.randint(0, 2)
        if when:
            self.elementwise(lines, arrays, work)
        if when < 2 or self.depth_of(lines) == 0:
            lines.append(f"  %{near.name} = {near.shape} copy-done(%{near.name}.s)")
            arrays.append(near)

    @staticmethod
    def depth_of(lines: list[str]) -> int:
        """Return 1 for the body of a loop, and 0 for the entry, which awaits all of its copies."""
        return int(any("get-tuple-element(%p), index=0" in line for line in lines))

    def loop(self, lines: list[str], arrays: list[Array], depth: int, work: Work) -> None:
        trips, name = self.draw.randint(2, 50), self.name("loop")
        carried = self.draw.choice([x for x in arrays if not x.near])
        state = f"(s32[], {carried.shape})"
        start = ["  %p = " + state + " parameter(0)", "  %i = s32[] get-tuple-element(%p), index=0"]
        inner = Array(self.name(), carried.dtype, carried.rows, carried.columns, carried.near)
        body = [*start, f"  %{inner.name} = {inner.shape} get-tuple-element(%p), index=1"]
        once = self.block(body, [inner], depth + 1)
        body += ["  %one = s32[] constant(1)", "  %next = s32[] add(%i, %one)"]
        body += [f"  ROOT %t = {state} tuple(%next, %{inner.name})"]
        test = [*start, f"  %n = s32[] constant({trips})", "  ROOT %lt = pred[] compare(%i, %n), direction=LT"]
        for role, found, kind in (("body", body, state), ("condition", test, "pred[]")):
            content = "\n".join(found)
            self.computations.append(f"%{name}.{role} (p: {state}) -> {kind} {{\n{content}\n}}\n")
        lines.append(f"  %{name}.z = s32[] constant(0)")
        lines.append(f"  %{name}.c = {state} tuple(%{name}.z, %{carried.name})")
        lines.append(f"  %{name} = {state} while(%{name}.c), condition=%{name}.condition, body=%{name}.body")
        work.add(trips * once.flops, trips * once.hbm_bytes)
