"""Lower bounds and estimates of a job's memory and time, without a compiler.

`lower_bound_bytes` and `lower_bound_seconds` are never above the true values, so a search may prune by them. The other
numbers are estimates: they order candidates, or prune with a margin.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.config.optimizer import ADAMW
from forerun.config.schema import Job, Remat
from forerun.hardware.chips import Chip
from forerun.hardware.mesh import MeshShape
from forerun.models.layer_kinds import LayerKind
from forerun.models.parameter_axes import matrix_count, parameter_count
from forerun.models.sizes import DecoderConfig
from forerun.resolve.resolved_job import ResolvedJob

BYTES = {"float32": 4, "bfloat16": 2}
MATMUL_SHARE, COPY_SHARE = 0.75, 0.8  # shares of the data sheet's rates; only for estimates
LINK_BYTES_PER_SECOND, HOST_BYTES_PER_SECOND = 45e9, 20e9
ACCUMULATION_SECONDS = 2e-3


@dataclass(frozen=True)
class Footprint:
    """The sizes of one job. FLOPs are those of a step over all devices; widths are elements per token and layer."""

    parameters: int  # of the model
    learned: int  # parameters with a gradient, of the model or of its adapters
    resting_bytes: int  # weights, moments and the average, over all devices, each array once
    flops: float  # forward and backward pass, without recomputation
    forward_layers_flops: float  # recomputed by full remat: all of a layer except its last matmul
    attention_flops: float  # part of forward_layers_flops that is not recomputed if the attention output is kept
    layers: int
    widths: dict[str, int]
    tokens: int
    sequence: int
    compute_bytes: int

    def lower_bound_bytes(self, mesh: MeshShape) -> float:
        """Return the minimum bytes per device: weights and optimizer state, split evenly over `fsdp` and `tp`.

        Activations and gradients are ignored, so a job above the limit can be rejected without compiling it.
        """
        return self.resting_bytes / (mesh.fsdp * mesh.tp)

    def saved_bytes(self, mesh: MeshShape, micro_batch: int, remat: Remat) -> float:
        """Return the estimated bytes per device of activations that are kept in HBM for the backward pass."""
        tokens = micro_batch * self.sequence / mesh.tp
        return tokens * self.layers * self._kept_width(remat) * self.compute_bytes

    def host_bytes(self, mesh: MeshShape, micro_batch: int, remat: Remat) -> float:
        """Return the estimated bytes per device of activations that are offloaded to host memory."""
        tokens = micro_batch * self.sequence / mesh.tp
        return tokens * self.layers * sum(self.widths.get(name, 0) for name in remat.offload) * self.compute_bytes

    def gradient_bytes(self, mesh: MeshShape, accumulation: int) -> float:
        """Return the estimated bytes per device of gradients, and of their float32 sum when they are accumulated."""
        copies = self.compute_bytes if accumulation == 1 else self.compute_bytes + 4
        return self.learned * copies / (mesh.fsdp * mesh.tp)

    def _kept_width(self, remat: Remat) -> int:
        """Return the elements per token and layer that `remat` keeps in HBM."""
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

        Without `remat`, the bound holds for all policies.
        """
        work = self.flops if remat is None else self.executed_flops(remat)
        return work / ((chip.bf16_flops_per_device or float("inf")) * devices)

    def guessed_seconds(self, chip: Chip, mesh: MeshShape, micro_batch: int, accumulation: int, remat: Remat) -> float:
        """Return an estimate of the seconds of a step, for ordering candidates.

        Computation, gathers of weights and host transfers overlap, so the longest of them counts. Other traffic is
        added to it.
        """
        work = self.lower_bound_seconds(chip, mesh.devices, remat) / MATMUL_SHARE
        link = chip.link_bytes_per_second or LINK_BYTES_PER_SECOND
        passes = 3 if remat.policy != "none" else 2  # gather forward and backward, scatter gradients
        weights = self.parameters * self.compute_bytes / mesh.tp
        gathered = 0.0 if mesh.fsdp == 1 else weights * passes * accumulation / (2 * link)
        copies = 0.0 if mesh.data == 1 else 2 * weights / mesh.fsdp / (2 * link)
        tokens = micro_batch * accumulation * self.sequence
        width = self.widths.get("layer_in", 0)
        split = 0.0 if mesh.tp == 1 else 8 * tokens * self.layers * width * self.compute_bytes / (2 * link) / 2
        host = 2 * self.host_bytes(mesh, micro_batch, remat) * accumulation / HOST_BYTES_PER_SECOND
        rows = min(1.0, micro_batch * self.sequence / mesh.tp / 4096)  # with few rows the matrix unit is partly idle
        memory = accumulation * 3 * weights / ((chip.hbm_bytes_per_second or 1e12) * COPY_SHARE)
        core = max(work / (0.6 + 0.4 * rows), memory)
        return (
            max(core, gathered, host)
            + 0.15 * min(core, gathered)
            + copies
            + split
            + accumulation * ACCUMULATION_SECONDS
        )


def kept_names(remat: Remat) -> set[str]:
    """Return the residuals that a named policy keeps in HBM.

    The input of a layer is one of them unless it is offloaded: the backward pass computes everything else from it.
    """
    return {*remat.keep, "layer_in"} - set(remat.offload)


def footprint(resolved: ResolvedJob) -> Footprint:
    """Return the sizes of a job. Decoders are counted without jax; other models need it for their specs."""
    job, config = resolved.job, resolved.config
    return _decoder(job, config) if isinstance(config, DecoderConfig) else _other_model(resolved)


def _decoder(job: Job, c: DecoderConfig) -> Footprint:
    """Return the sizes of a job whose model is of the decoder family."""
    parameters, matrices, table = parameter_count(c), matrix_count(c), c.vocab * c.embed
    queries, values = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = sum(_mixer_flops(c, kind, job.sequence) for kind in c.all_kinds)  # forward, per token
    tokens = job.batch * job.sequence
    dots = 2 * c.embed + queries + 2 * values + 2 * c.mlp
    widths = {
        "layer_in": c.embed,
        "query": queries,
        "key": values,
        "value": values,
        "attention_out": queries,
        "mlp_gate": c.mlp,
        "mlp_up": c.mlp,
        "full": c.embed,
        "dots": c.embed + dots,
        "none": c.embed + dots + queries + c.mlp,
    }
    learned, resting_bytes = _resting(job, parameters)
    per_weight = 4.0 if job.method.trains_adapters else 6.0  # a fixed weight has no gradient
    return Footprint(
        parameters=parameters,
        learned=learned,
        resting_bytes=resting_bytes,
        flops=tokens * (per_weight * (matrices + table) + 3 * attention),
        forward_layers_flops=tokens * (2.0 * (matrices - c.layers * c.embed * c.mlp) + attention),
        attention_flops=tokens * attention,
        layers=c.layers,
        widths=widths,
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


def _other_model(resolved: ResolvedJob) -> Footprint:
    """Return the sizes of a job with another model. Its activations are unknown, so none are counted."""
    job, model, parameters = resolved.job, resolved.model, resolved.parameters
    tokens = job.batch * job.sequence
    flops = model.flops_per_token(job.sequence) * tokens
    compute = BYTES[job.precision.compute]
    return Footprint(parameters, *_resting(job, parameters), flops, 0.0, 0.0, 0, {}, tokens, job.sequence, compute)


def _resting(job: Job, parameters: int) -> tuple[int, int]:
    """Return the number of parameters with a gradient, and the bytes of weights and optimizer state.

    Other weights than the model's (adapters, learned scales, a teacher) and the state of other optimizers than AdamW
    are counted from the specs, which needs jax.
    """
    size = BYTES[job.precision.params]
    if not job.method.may_hold_other_weights and job.optimizer.name == ADAMW:
        return parameters, parameters * size * (3 if job.optimizer.ema is None else 4)
    from forerun.program.sizes import resting

    found = resting(job)
    return found.gradient_bytes // size, found.state_bytes
