"""Lower bounds and estimates of a job's memory and time, without a compiler.

`lower_bound_bytes`, `lower_bound_seconds` and `lower_bound_step_seconds` are never above the true values, so a search
may prune by them. The other numbers are estimates: they order candidates, or prune with a margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.config.optimizer import ADAMW
from forerun.config.schema import Remat
from forerun.hardware.chips import Chip
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import Slice
from forerun.models.decoder_config import DecoderConfig
from forerun.models.layer_kinds import LayerKind, LayerShape
from forerun.models.parameter_axes import (
    active_expert_count,
    active_layer_matrix_count,
    active_matrix_count,
    fixed_count,
    outer_axes,
    parameter_count,
    shape_of,
)
from forerun.resolve.resolved_job import ResolvedJob

BYTES = {"float32": 4, "bfloat16": 2}
MATMUL_SHARE, COPY_SHARE = 0.75, 0.8  # shares of the data sheet's rates; only for estimates
ACCUMULATION_SECONDS = 2e-3
TPU_LINK_BYTES_PER_SECOND, TPU_HOST_BYTES_PER_SECOND = 45e9, 20e9
NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE = 0.8, 0.6, 0.8  # shares of the data sheet's rates; assumed, 2026-11
NETWORK_BYTES_PER_SECOND = 1.5e9  # per GPU without a figure: 100 Gbit/s for eight GPUs; assumed, 2026-11
SAVED_PASSES = (
    3  # times that a saved activation moves between HBM and the cores; fitted to bench/results/search_quality
)


@dataclass(frozen=True)
class Footprint:
    """The sizes of one job. FLOPs are those of a step over all devices; widths are elements per token in all layers."""

    parameters: int  # of the model
    learned: int  # parameters with a gradient, of the model or of its adapters
    resting_bytes: int  # weights, moments and the average, over all devices, each array once
    flops: float  # forward and backward pass, without recomputation
    forward_layers_flops: float  # recomputed by full remat: all of a layer except its last matmul
    attention_flops: float  # part of forward_layers_flops that is not recomputed if the attention output is kept
    widths: dict[str, int]
    tokens: int
    sequence: int
    compute_bytes: int

    def lower_bound_bytes(self, mesh: MeshShape) -> float:
        """Return the minimum bytes per device: weights and optimizer state, split evenly over `fsdp` and `tp`.

        Activations and gradients are ignored, so a job above the limit can be rejected without compiling it.
        """
        return self.resting_bytes / mesh.weight_parts

    def saved_bytes(self, mesh: MeshShape, micro_batch: int, remat: Remat) -> float:
        """Return the estimated bytes per device of activations that are kept in HBM for the backward pass."""
        tokens = micro_batch * self.sequence / (mesh.tp * mesh.context)
        return tokens * self._kept_width(remat) * self.compute_bytes

    def host_bytes(self, mesh: MeshShape, micro_batch: int, remat: Remat) -> float:
        """Return the estimated bytes per device of activations that are offloaded to host memory."""
        tokens = micro_batch * self.sequence / (mesh.tp * mesh.context)
        return tokens * sum(self.widths.get(name, 0) for name in remat.offload) * self.compute_bytes

    def gradient_bytes(self, mesh: MeshShape, accumulation: int) -> float:
        """Return the estimated bytes per device of gradients, and of their float32 sum when they are accumulated."""
        copies = self.compute_bytes if accumulation == 1 else self.compute_bytes + 4
        return self.learned * copies / mesh.weight_parts

    def _kept_width(self, remat: Remat) -> int:
        """Return the elements per token that `remat` keeps in HBM."""
        w = self.widths
        if not w:
            return 0
        if remat.policy == "named":
            return sum(w[name] for name in kept_names(remat))
        return w[remat.policy]

    def executed_flops(self, remat: Remat) -> float:
        """Return the FLOPs of a step, including those that `remat` computes again."""
        if remat.policy in ("none", "dots"):
            return self.flops + (self.attention_flops if remat.policy == "dots" else 0.0)
        kept = self.attention_flops if "attention_out" in remat.keep + remat.offload else 0.0
        return self.flops + max(0.0, self.forward_layers_flops - kept)

    def lower_bound_seconds(self, chip: Chip, devices: int, remat: Remat | None = None) -> float:
        """Return the minimum seconds of a step, at the peak FLOP/s of the data sheet.

        Without `remat`, the bound holds for all policies. It is 0 if no peak is known.
        """
        work = self.flops if remat is None else self.executed_flops(remat)
        return work / (peak_flops_per_device(chip) * devices)

    def lower_bound_step_seconds(self, chip: Chip, mesh: MeshShape) -> float:
        """Return the minimum seconds of a step on a mesh, at the peak rates of the data sheet.

        Every step needs the FLOPs of the forward and backward pass. It also reads all weights and optimizer state from
        HBM, and writes the share that is trained. Both may overlap, so the longer one counts. Recomputation is not
        counted: the compiler can remove it from a program with one layer.
        """
        passes = 1 + min(1.0, self.learned / self.parameters)
        moved = passes * self.lower_bound_bytes(mesh) - (chip.gpu.l2_bytes if chip.gpu else 0)
        rate = chip.hbm_bytes_per_second / chip.devices_per_chip if chip.hbm_bytes_per_second else math.inf
        return max(self.lower_bound_seconds(chip, mesh.devices), moved / rate)

    def guessed_seconds(self, on: Slice, mesh: MeshShape, micro_batch: int, accumulation: int, remat: Remat) -> float:
        """Return an estimate of the seconds of a step, for ordering candidates.

        Computation, gathers of weights and host transfers overlap, so the longest of them counts. Other traffic is
        added to it.
        """
        chip, links = on.chip, LinkSpeeds.of(on)
        work = self.lower_bound_seconds(chip, mesh.devices, remat) / MATMUL_SHARE
        passes = 3 if remat.policy != "none" else 2  # gather forward and backward, scatter gradients
        weights = self.parameters * self.compute_bytes / mesh.tp
        gathered = copies = split = 0.0
        if (shards := mesh.weight_parts // mesh.tp) > 1:
            gathered = weights * passes * accumulation / links.collective_bytes_per_second(shards, mesh.tp)
        if mesh.data > 1:
            rate = links.collective_bytes_per_second(mesh.data, mesh.weight_parts)
            copies = 2 * weights / shards / rate
        if mesh.tp > 1:
            tokens = micro_batch * accumulation * self.sequence / mesh.context
            activations = tokens * self.widths.get("layer_in", 0) * self.compute_bytes
            split = 8 * activations / links.collective_bytes_per_second(mesh.tp, 1) / 2
        host = 2 * self.host_bytes(mesh, micro_batch, remat) * accumulation / links.host_bytes_per_second
        rows = min(
            1.0, micro_batch * self.sequence / (mesh.tp * mesh.context) / 4096
        )  # with few rows the matrix unit is partly idle
        copy_rate = (chip.hbm_bytes_per_second or 1e12) * COPY_SHARE
        memory = accumulation * 3 * weights / copy_rate
        kept = accumulation * (self.saved_bytes(mesh, micro_batch, remat) + self.host_bytes(mesh, micro_batch, remat))
        core = max(work / (0.6 + 0.4 * rows), memory) + SAVED_PASSES * kept / copy_rate
        return (
            max(core, gathered, host)
            + 0.15 * min(core, gathered)
            + copies
            + split
            + accumulation * ACCUMULATION_SECONDS
        )


def peak_flops_per_device(chip: Chip) -> float:
    """Return the highest FLOP/s that one device can reach in training, or infinity if no figure is known.

    A GPU without bfloat16 matmuls is bounded by its float16 peak: it computes bfloat16 more slowly than that.
    """
    fp16 = chip.gpu.fp16_flops if chip.gpu else None
    return chip.bf16_flops_per_device or fp16 or math.inf


def kept_names(remat: Remat) -> set[str]:
    """Return the residuals that a named policy keeps in HBM.

    The input of a layer is one of them unless it is offloaded: the backward pass computes everything else from it.
    """
    return {*remat.keep, "layer_in"} - set(remat.offload)


def footprint(resolved: ResolvedJob) -> Footprint:
    """Return the sizes of a job. Decoders are counted without jax; other models need it for their specs."""
    config = resolved.config
    return decoder_footprint(resolved, config) if isinstance(config, DecoderConfig) else _other_model(resolved)


def decoder_footprint(resolved: ResolvedJob, c: DecoderConfig) -> Footprint:
    """Return the sizes of a job whose model is of the decoder family. Every layer counts with its own shape."""
    job = resolved.job
    parameters, matrices = parameter_count(c), active_matrix_count(c)
    down = sum(c.embed * _mlp_width(c, kind.shape) + active_expert_count(c, kind.shape) // 3 for kind in c.all_kinds)
    attention = sum(_mixer_flops(c, kind, job.sequence) for kind in c.all_kinds)  # forward, per token
    tokens = job.batch * job.sequence
    learned, resting_bytes = _resting(resolved, parameters, fixed_count(c))
    per_weight = 4.0 if job.method.trains_adapters else 6.0  # a fixed weight has no gradient
    return Footprint(
        parameters=parameters,
        learned=learned,
        resting_bytes=resting_bytes,
        flops=tokens * (per_weight * (matrices + _outer_matrix_count(c)) + 3 * attention),
        forward_layers_flops=tokens * (2.0 * (matrices - down) + attention),
        attention_flops=tokens * attention,
        widths=_widths(c),
        tokens=tokens,
        sequence=job.sequence,
        compute_bytes=BYTES[job.precision.compute],
    )


def _mixer_flops(c: DecoderConfig, kind: LayerKind, sequence: int) -> float:
    """Return the FLOPs per token of the forward pass of attention or of another mixer, without its matrices."""
    if kind.mixer == "convolution":
        return 0.0
    queries = c.size("H", kind.shape) * c.size("D", kind.shape)
    if kind.mixer == "delta":
        return 6.0 * queries * c.size("W", kind.shape)
    window = min(kind.window or sequence, sequence)
    return 4.0 * queries * window * (1 - window / (2 * sequence))


def _outer_matrix_count(c: DecoderConfig) -> int:
    """Return the elements of the matrices outside the layers: the read-out, and others that are no tables of tokens."""
    others = [axes for axes in outer_axes(c).values() if len(axes) > 1 and not axes.startswith("V")]
    return c.vocab * c.embed + sum(math.prod(shape_of(c, axes)) for axes in others)


def _widths(c: DecoderConfig) -> dict[str, int]:
    """Return the elements per token of the residuals and policies of remat, over all layers."""
    total: dict[str, int] = {}
    for kind in c.all_kinds:
        for name, width in _layer_widths(c, kind).items():
            total[name] = total.get(name, 0) + width
    return total


def _layer_widths(c: DecoderConfig, kind: LayerKind) -> dict[str, int]:
    shape, attends = kind.shape, kind.mixer == "attention"
    queries = c.size("H", shape) * c.size("D", shape) if attends else 0
    values = c.size("K", shape) * c.size("D", shape) if attends else 0
    keys = 0 if shape is not None and shape.shares_keys else values
    mlp = _mlp_width(c, shape)
    # Every matrix maps from or to the width of the model. The quotient is the sum of their other dimensions: outputs
    # of the matrices that read the layer's input, inputs of those that write its output.
    inner = active_layer_matrix_count(c, shape) // c.embed
    routed = active_expert_count(c, shape) // c.embed  # no policy keeps their products, except for "none"
    return {
        "layer_in": c.embed,
        "query": queries,
        "key": keys,
        "value": keys,
        "attention_out": queries,
        "mlp_gate": mlp,
        "mlp_up": mlp,
        "full": c.embed,
        "dots": 3 * c.embed + inner - queries - mlp - routed,
        "none": 3 * c.embed + inner,
    }


def _mlp_width(c: DecoderConfig, shape: LayerShape | None) -> int:
    """Return the width of the MLP that every token uses, or 0 for a layer with only experts."""
    return c.size("F", shape) if c.has_mlp else 0


def _other_model(resolved: ResolvedJob) -> Footprint:
    """Return the sizes of a job with another model. Its activations are unknown, so none are counted."""
    from forerun.methods.method import parameter_count

    job, model, parameters = resolved.job, resolved.model, parameter_count(resolved)
    tokens = job.batch * job.sequence
    flops = model.flops_per_token(job.sequence) * tokens
    compute = BYTES[job.precision.compute]
    return Footprint(parameters, *_resting(resolved, parameters), flops, 0.0, 0.0, {}, tokens, job.sequence, compute)


def _resting(resolved: ResolvedJob, parameters: int, fixed: int = 0) -> tuple[int, int]:
    """Return the number of parameters with a gradient, and the bytes of weights and optimizer state.

    Other weights than the model's (adapters, learned scales, a teacher) and the state of other optimizers than AdamW
    are counted from the specs, which needs jax. `fixed` parameters of the model have neither a gradient nor a state.
    """
    job, size = resolved.job, BYTES[resolved.job.precision.params]
    if not job.method.may_hold_other_weights and job.optimizer.name == ADAMW:
        learned = parameters - fixed
        return learned, size * (parameters + learned * (2 if job.optimizer.ema is None else 3))
    from forerun.program.state import resting

    found = resting(resolved)
    return found.gradient_bytes // size, found.state_bytes


@dataclass(frozen=True)
class LinkSpeeds:
    """Speeds of one device, one way. A TPU's collectives use both directions of one link at the same time."""

    inside_bytes_per_second: float  # between devices of one machine; of all devices of a TPU slice
    network_bytes_per_second: float  # between machines
    host_bytes_per_second: float
    devices_per_machine: int

    @classmethod
    def of(cls, on: Slice) -> LinkSpeeds:
        """Return the speeds of a slice or of GPU machines."""
        gpu, link = on.chip.gpu, on.chip.link_bytes_per_second
        if gpu is None:
            both = 2 * (link or TPU_LINK_BYTES_PER_SECOND)
            return cls(both, both, TPU_HOST_BYTES_PER_SECOND, on.devices)
        pcie = gpu.pcie_bytes_per_second * PCIE_SHARE
        nvlink = gpu.nvlink_bytes_per_second
        return cls(
            inside_bytes_per_second=pcie if nvlink is None else nvlink * NVLINK_SHARE,
            network_bytes_per_second=(gpu.network_bytes_per_second or NETWORK_BYTES_PER_SECOND) * NETWORK_SHARE,
            host_bytes_per_second=pcie,
            devices_per_machine=on.devices // on.hosts,
        )

    def collective_bytes_per_second(self, size: int, stride: int) -> float:
        """Return the bytes per second that a device receives in a collective over an axis of the mesh.

        Args:
            size: The devices of the axis.
            stride: The distance of neighbours on the axis, in devices. The product of both decides whether the axis
                stays within a machine. Across machines, all devices of the axis in a machine share the traffic.
        """
        if size * stride <= self.devices_per_machine:
            return self.inside_bytes_per_second
        together = min(size, max(1, self.devices_per_machine // stride))
        across = self.network_bytes_per_second * together
        return across if together == 1 else min(self.inside_bytes_per_second, across)
