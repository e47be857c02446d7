"""What a job needs at least, by formula and without a compiler: bytes at rest, saved activations, FLOPs, seconds.

Bounds (`state_bytes`, `least_seconds`) are safe to prune by; `saved_bytes` and `guessed_seconds` only say what to
try first, or prune with a margin.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.config.schema import Job, Remat
from forerun.hardware.chips import Chip
from forerun.hardware.mesh import MeshShape
from forerun.models.pretrained import config_of
from forerun.models.sizes import DecoderConfig, is_plugin

BYTES = {"float32": 4, "bfloat16": 2}
MATMUL_SHARE, COPY_SHARE = 0.75, 0.8  # of the data sheet; for guesses only
LINK_BYTES_PER_SECOND, HOST_BYTES_PER_SECOND = 45e9, 20e9
ACCUMULATION_SECONDS = 2e-3


@dataclass(frozen=True)
class Footprint:
    """Of one job. FLOPs are of a whole step over all devices; activation widths are elements per token and layer."""

    parameters: int
    learned: int  # of them, or of what stands beside them
    resting_bytes: int  # weights, moments, an average
    flops: float  # forward and backward, nothing twice
    forward_layers_flops: float  # what full remat computes again, the last matmul of a layer left out
    attention_flops: float  # of it, what a kept attention output saves
    layers: int
    widths: dict[str, int]
    tokens: int
    sequence: int
    compute_bytes: int

    def state_bytes(self, mesh: MeshShape) -> float:
        """Per device, at least: weights and optimizer, split as evenly as can be."""
        return self.resting_bytes / (mesh.fsdp * mesh.tp)

    def saved_bytes(self, mesh: MeshShape, micro_batch: int, remat: Remat) -> float:
        """Per device: what waits for the backward pass in HBM."""
        tokens = micro_batch * self.sequence / mesh.tp
        return tokens * self.layers * self._kept_width(remat) * self.compute_bytes

    def host_bytes(self, mesh: MeshShape, micro_batch: int, remat: Remat) -> float:
        """Per device: what waits in host memory."""
        tokens = micro_batch * self.sequence / mesh.tp
        return tokens * self.layers * sum(self.widths.get(name, 0) for name in remat.offload) * self.compute_bytes

    def gradient_bytes(self, mesh: MeshShape, accumulation: int) -> float:
        """Per device, about: gradients, and their sum in float32 when they are accumulated."""
        copies = self.compute_bytes if accumulation == 1 else self.compute_bytes + 4
        return self.learned * copies / (mesh.fsdp * mesh.tp)

    def _kept_width(self, remat: Remat) -> int:
        w = self.widths
        if not w:
            return 0
        if remat.policy == "named":
            return sum(w[name] for name in kept_names(remat))
        return w[remat.policy]

    def executed_flops(self, remat: Remat) -> float:
        if remat.policy in ("none", "dots"):
            return self.flops + (self.attention_flops if remat.policy == "dots" else 0.0)
        kept = self.attention_flops if "attention_out" in remat.keep + remat.offload else 0.0
        return self.flops + max(0.0, self.forward_layers_flops - kept)

    def least_seconds(self, chip: Chip, devices: int, remat: Remat | None = None) -> float:
        """No step is shorter: the work at the data sheet's peak. Without `remat`, the least of all policies."""
        work = self.flops if remat is None else self.executed_flops(remat)
        return work / ((chip.bf16_flops_per_device or float("inf")) * devices)

    def guessed_seconds(self, chip: Chip, mesh: MeshShape, micro_batch: int, accumulation: int, remat: Remat) -> float:
        """For order only: compute beside traffic, whichever takes longer, and what cannot hide behind either."""
        work = self.least_seconds(chip, mesh.devices, remat) / MATMUL_SHARE
        link = chip.link_bytes_per_second or LINK_BYTES_PER_SECOND
        passes = 3 if remat.policy != "none" else 2  # gathered forward and backward, gradients scattered
        weights = self.parameters * self.compute_bytes / mesh.tp
        gathered = 0.0 if mesh.fsdp == 1 else weights * passes * accumulation / (2 * link)
        copies = 0.0 if mesh.data == 1 else 2 * weights / mesh.fsdp / (2 * link)
        tokens = micro_batch * accumulation * self.sequence
        width = self.widths.get("layer_in", 0)
        split = 0.0 if mesh.tp == 1 else 8 * tokens * self.layers * width * self.compute_bytes / (2 * link) / 2
        host = 2 * self.host_bytes(mesh, micro_batch, remat) * accumulation / HOST_BYTES_PER_SECOND
        rows = min(1.0, micro_batch * self.sequence / mesh.tp / 4096)  # few rows keep the matrix unit waiting
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
    """Of a named policy, what stays in HBM: a layer's input does unless it is offloaded, all else starts from it."""
    return {*remat.keep, "layer_in"} - set(remat.offload)


def footprint(job: Job) -> Footprint:
    """`job` is concrete. A model that is no decoder of ours is asked for its specs, which needs jax."""
    config = None if is_plugin(job.model) else config_of(job.model)
    return _decoder(job, config) if isinstance(config, DecoderConfig) else _foreign(job)


def _decoder(job: Job, c: DecoderConfig) -> Footprint:
    queries, values = c.heads * c.head_dim, c.kv_heads * c.head_dim
    matrices = c.embed * (2 * queries + 2 * values) + 3 * c.embed * c.mlp
    small = 2 * c.embed + (queries + 2 * values if c.qkv_bias else 0) + (2 * c.head_dim if c.qk_norm else 0)
    table = c.vocab * c.embed
    parameters = c.layers * (matrices + small) + table * (1 if c.tied else 2) + c.embed
    windows = [min(kind.window or job.sequence, job.sequence) for kind in c.layer_kinds]
    seen = sum(window * (1 - window / (2 * job.sequence)) for window in windows) / len(windows)
    attention = 4.0 * c.layers * queries * seen  # forward, per token
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
    per_weight = 6.0 if job.lora is None else 4.0  # a weight at rest has no gradient of its own
    return Footprint(
        parameters=parameters,
        learned=learned,
        resting_bytes=resting_bytes,
        flops=tokens * (per_weight * (c.layers * matrices + table) + 3 * attention),
        forward_layers_flops=tokens * (2.0 * c.layers * (matrices - c.embed * c.mlp) + attention),
        attention_flops=tokens * attention,
        layers=c.layers,
        widths=widths,
        tokens=tokens,
        sequence=job.sequence,
        compute_bytes=BYTES[job.precision.compute],
    )


def _foreign(job: Job) -> Footprint:
    """No activation is known: nothing is pruned for it."""
    import jax

    from forerun.models.registry import model_of
    from forerun.nn.spec import count

    model = model_of(job.model)
    tokens = job.batch * job.sequence
    flops = model.flops_per_token(job.sequence) * tokens
    parameters = count(jax.tree.leaves(model.specs()))
    compute = BYTES[job.precision.compute]
    return Footprint(parameters, *_resting(job, parameters), flops, 0.0, 0.0, 0, {}, tokens, job.sequence, compute)


def _resting(job: Job, parameters: int) -> tuple[int, int]:
    """(what learns, bytes at rest). Adapters and companions need the specs, and so jax."""
    size = BYTES[job.precision.params]
    companion = job.preferences is not None and job.preferences.reference == "beside"
    if job.lora is None and job.distil is None and not companion:
        return parameters, parameters * size * (3 if job.optimizer.ema is None else 4)
    from forerun.methods.sizes import resting

    found = resting(job)
    return found.gradient_bytes // size, found.state_bytes
