"""The mesh data x fsdp x tp (x expert x context), and its checks against devices, batch and heads."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from math import log, prod

from forerun.errors import UserError

AXES = ("data", "fsdp", "tp")
REST = -1


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the mesh axes.

    `data`, `fsdp` and `expert` split the batch, and `expert` also the experts of a layer. `fsdp`, `expert`, `context`
    and `tp` split the weights. `context` splits each sequence.
    """

    data: int
    fsdp: int
    tp: int
    _: KW_ONLY
    slices: int = 1  # TPU slices, each with this mesh; they split the batch, and each has a copy of the weights
    context: int = 1  # devices that share each sequence
    expert: int = 1  # devices that share the experts of each layer

    @property
    def devices(self) -> int:
        return self.slices * self.data * self.fsdp * self.tp * self.context * self.expert

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of one slice by name, outermost first. The axes expert and context exist if they split something."""
        middle = {name: size for name, size in self._optional.items() if size > 1}
        return {"data": self.data, "fsdp": self.fsdp, **middle, "tp": self.tp}

    @property
    def weight_parts(self) -> int:
        """Number of parts that the stored weights are split into."""
        return self.fsdp * self.tp * self.context * self.expert

    @property
    def data_parallel(self) -> int:
        """Number of parts that the batch is split into."""
        return self.slices * self.data * self.fsdp * self.expert

    @property
    def _optional(self) -> dict[str, int]:
        return {"expert": self.expert, "context": self.context}

    def __str__(self) -> str:
        one = f"{self.data}x{self.fsdp}x{self.tp}"
        one += "".join(f" {name}={size}" for name, size in self._optional.items() if size > 1)
        return one if self.slices == 1 else f"{self.slices}x({one})"

    def overrides(self) -> str:
        """Return the mesh as command-line overrides."""
        text = f"mesh.data={self.data} mesh.fsdp={self.fsdp} mesh.tp={self.tp}"
        text += "".join(f" mesh.{name}={size}" for name, size in self._optional.items() if size > 1)
        return text + (f" mesh.slices={self.slices}" if self.slices > 1 else "")


def slices_of(
    wanted: int | None, present: int, platform: str, devices: int | None, place: str, least: int | None = None
) -> int:
    """Return the number of slices of a run.

    Args:
        wanted: The job's `mesh.slices`; None means all slices of the place.
        present: The slices of the place.
        platform: Its platform. Virtual CPU devices can be split into any number of slices.
        devices: The job's `devices`.
        place: What has these slices, for the error message.
        least: The job's `mesh.min_slices`: the place may have this number of slices or more, up to `wanted`.

    Raises:
        UserError: The place has another number of slices, is a GPU machine, or the job uses only a part of its devices.
    """
    count = present if wanted is None else wanted
    if count == present == 1:
        return 1
    if platform == "gpu":
        raise UserError(
            "E-HARDWARE-025",
            f"mesh.slices={count} does not work with GPUs",
            why="slices are groups of TPU chips; the network between GPU machines is part of the other axes",
            fix="remove mesh.slices; mesh.data=N gives each of N machines a copy of the weights",
        )
    if platform == "tpu" and least is not None and least <= present <= count:
        return present
    if platform == "tpu" and count != present:
        raise UserError(
            "E-HARDWARE-026",
            f"mesh.slices={count}, but {place} has {present} slice{'' if present == 1 else 's'}",
            why="each slice has its own mesh, and the network between slices joins them",
            fix=f"set mesh.slices={present}, or remove it to use the slices that exist",
        )
    if devices is not None and platform == "tpu":
        raise UserError(
            "E-HARDWARE-027",
            f"devices={devices} does not work with {count} slices",
            why="a run on several slices uses all of their devices",
            fix="remove devices, or use one slice",
        )
    return count


def require_one_slice(slices: int, place: str) -> None:
    """Raise an error for `forerun cache` on several slices. They would compute independent rows."""
    if slices > 1:
        raise UserError(
            "E-HARDWARE-030",
            f"forerun cache does not run on several slices: {place} has {slices}",
            why="its rows are independent, so the network between slices would only cost time",
            fix="use one slice",
        )


def resolve(
    data: int,
    fsdp: int,
    tp: int,
    devices: int,
    place: str = "this machine",
    slices: int = 1,
    *,
    context: int = 1,
    expert: int = 1,
) -> MeshShape:
    """Return the mesh for a number of devices.

    Args:
        data: Size of the axis; -1 means all remaining devices, for one axis only. The same holds for `fsdp` and `tp`.
        fsdp: See `data`.
        tp: See `data`.
        devices: Number of devices that the mesh must use.
        place: What has these devices, for the error message.
        slices: The slices that share these devices equally. The other sizes are those within one slice.
        context: Size of the axis that splits each sequence, at least 1.
        expert: Size of the axis that splits the experts of a layer, at least 1.

    Raises:
        UserError: A size is invalid, or the sizes do not match the number of devices.
    """
    if slices > 1:
        if context > 1:
            raise UserError(
                "E-HARDWARE-041",
                f"mesh.context={context} does not work on {slices} slices",
                why="no test has shown that sequences split within each of several slices give the same result",
                fix="set mesh.context=1, or use one slice",
            )
        if devices % slices:
            raise UserError(
                "E-HARDWARE-028",
                f"mesh.slices={slices} does not divide the {devices} devices of {place}",
                why="all slices have the same number of devices",
                fix=" or ".join(f"mesh.slices={value}" for value in _nearest_divisors(devices, slices)),
            )
        one = resolve(data, fsdp, tp, devices // slices, f"each slice of {place}", expert=expert)
        return replace(one, slices=slices)
    wanted = (data, fsdp, tp)
    for axis, size in zip(AXES, wanted, strict=True):
        if size < 1 and size != REST:
            raise UserError(
                "E-HARDWARE-005",
                f"mesh.{axis}={size} is not a number of devices",
                why="an axis is 1 or more, or -1 for all remaining devices",
                fix=f"set mesh.{axis}=1, or mesh.{axis}=-1",
            )
    open_axes = [axis for axis, size in zip(AXES, wanted, strict=True) if size == REST]
    if len(open_axes) > 1:
        raise UserError(
            "E-HARDWARE-006",
            f"{' and '.join(f'mesh.{axis}' for axis in open_axes)} are -1",
            why="only one axis can use the remaining devices",
            fix=f"set mesh.{open_axes[0]}=1 and leave mesh.{open_axes[1]}=-1",
        )
    given = prod(size for size in wanted if size != REST) * context * expert
    if open_axes and devices % given == 0:
        data, fsdp, tp = (devices // given if size == REST else size for size in wanted)
        return MeshShape(data, fsdp, tp, context=context, expert=expert)
    if not open_axes and given == devices:
        return MeshShape(data, fsdp, tp, context=context, expert=expert)
    raise _impossible(wanted, given, devices, place, MeshShape(1, 1, 1, context=context, expert=expert))


def valid_meshes(devices: int, context: int = 1, expert: int = 1) -> list[MeshShape]:
    """Return every mesh that uses exactly `devices` devices and has these sizes of the axes context and expert."""
    if devices % (context * expert):
        return []
    others = devices // (context * expert)
    return [
        MeshShape(data, fsdp, others // data // fsdp, context=context, expert=expert)
        for data in divisors(others)
        for fsdp in divisors(others // data)
    ]


def nearest_meshes(wanted: tuple[int, int, int], devices: int, *, context: int = 1, expert: int = 1) -> list[MeshShape]:
    """Return the three valid meshes nearest to the wanted one.

    Their axes context and expert have the largest possible sizes. The distance is the sum of |log ratio| over the axes.
    An axis of -1 is not compared.
    """

    def distance(mesh: MeshShape) -> tuple[float, float, int, int]:
        sizes = (mesh.data, mesh.fsdp, mesh.tp)
        ratios = [abs(log(size / want)) for size, want in zip(sizes, wanted, strict=True) if want != REST]
        # Round so that equal distances tie. Then prefer a smaller tp, which communicates less, and a smaller data,
        # which has fewer copies of the weights.
        return (round(sum(ratios), 9), round(max(ratios, default=0.0), 9), mesh.tp, mesh.data)

    context = math.gcd(devices, context)
    return sorted(valid_meshes(devices, context, math.gcd(devices // context, expert)), key=distance)[:3]


def check_sequence(shape: MeshShape, sequence: int) -> None:
    """Raise an error unless the sequence can be split over the context axis.

    Every device has two chunks of each sequence, an early and a late one, so that all have the same causal work.
    """
    chunks = 2 * shape.context
    if shape.context > 1 and sequence % chunks:
        near = sorted({max(sequence // chunks, 1) * chunks, (sequence // chunks + 1) * chunks})
        raise UserError(
            "E-HARDWARE-040",
            f"sequence={sequence} does not divide into the {chunks} chunks of mesh.context={shape.context}",
            why="each device of the context axis has two chunks of every sequence",
            fix=" or ".join(f"sequence={value}" for value in near),
        )


def check_experts(shape: MeshShape, experts: int | None, model: str) -> None:
    """Raise an error unless the experts of a layer can be split over the expert axis.

    Args:
        shape: The mesh.
        experts: The experts of each layer, or None for a model without experts.
        model: What has these experts, for the error message.
    """
    if shape.expert == 1:
        return
    if experts is None:
        raise UserError(
            "E-HARDWARE-070",
            f"mesh.expert={shape.expert}, but {model} has no mixture of experts",
            why="the axis splits the experts of each layer",
            fix="remove mesh.expert; mesh.fsdp splits the weights and the batch of every model",
        )
    if experts % shape.expert:
        near = _nearest_divisors(experts, shape.expert)
        raise UserError(
            "E-HARDWARE-071",
            f"mesh.expert={shape.expert} does not divide the {experts} experts of {model}",
            why="every device of the axis has the same number of experts",
            fix=" or ".join(f"mesh.expert={value}" for value in near),
        )


def check_model(shape: MeshShape, heads: int | None, batch: int, micro_batch: int | None) -> None:
    """Raise an error unless batch, micro-batch and heads divide evenly over the mesh."""
    parts = shape.data_parallel
    if batch % parts:
        axes = {"slices": shape.slices} if shape.slices > 1 else {}
        axes |= {"data": shape.data, "fsdp": shape.fsdp}
        axes |= {"expert": shape.expert} if shape.expert > 1 else {}
        named = f"{' x '.join(axes)} = {' x '.join(map(str, axes.values()))}"
        near = sorted({max(batch // parts, 1) * parts, (batch // parts + 1) * parts})
        raise UserError(
            "E-HARDWARE-007",
            f"batch={batch} does not divide over {parts} data-parallel devices",
            why=f"mesh {shape}: {named} = {parts}",
            fix=" or ".join(f"batch={value}" for value in near),
        )
    if micro_batch is not None and (batch // parts) % micro_batch:
        share = batch // parts
        near = _nearest_divisors(share, micro_batch)
        raise UserError(
            "E-HARDWARE-008",
            f"micro_batch={micro_batch} does not divide the {share} sequences of a device",
            why=f"batch {batch} over {parts} data-parallel devices (mesh {shape}) is {share} each",
            fix=" or ".join(f"micro_batch={value}" for value in near)
            + f", or batch={max(batch // (parts * micro_batch), 1) * parts * micro_batch}",
        )
    if heads is not None and heads % shape.tp:
        near = _nearest_divisors(heads, shape.tp)
        raise UserError(
            "E-HARDWARE-009",
            f"mesh.tp={shape.tp} does not divide the model's {heads} heads",
            why="tensor parallelism gives every device the same number of heads",
            fix=" or ".join(f"mesh.tp={value}" for value in near),
        )


def _impossible(wanted: tuple[int, int, int], given: int, devices: int, place: str, others: MeshShape) -> UserError:
    """Return the error for a mesh that does not match the devices. `given` is the product of its fixed axes."""
    optional = {name: size for name, size in others.sizes.items() if name not in AXES}
    text = "x".join("?" if size == REST else str(size) for size in wanted)
    text += "".join(f" {name}={size}" for name, size in optional.items())
    if REST in wanted:
        what = f"mesh {text} cannot be filled: the {devices} devices of {place} do not divide by {given}"
    else:
        what = f"mesh {text} needs {given} devices, {place} has {devices}"
    why = f"{' x '.join((*AXES, *optional))} must be the number of devices"
    if devices == 1 and given == 8:
        why += "; a v6e-1 is one chip with one device, 8 devices are a v6e-8"
    elif devices == 4 and given == 8:
        why += "; a v4-8 or v5p-8 is 4 chips and 4 devices, as its name counts TensorCores"
    near = nearest_meshes(wanted, devices, context=others.context, expert=others.expert)
    return UserError(
        "E-HARDWARE-010", what, why=why, fix="use one of these:\n" + "\n".join(f"- {mesh.overrides()}" for mesh in near)
    )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    # Each divisor above the square root has a partner below it.
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the largest divisor up to `wanted` and the smallest from `wanted` on, if it exists."""
    known = divisors(number)
    below = [size for size in known if size <= wanted]
    above = [size for size in known if size >= wanted]
    return sorted({below[-1], above[0]} if above else {below[-1]})
