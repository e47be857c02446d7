"""Published TPU runs that the step-time model was not developed with, as forerun jobs, and their split.

python bench/accuracy/more_runs.py    # writes tpu_split.csv and prints the hashes of the sealed files

unused_published.csv lists every published run that is not in runs.py. A row with a model is a run that forerun can
describe; the others have their reason in the column `unlike`. Runs are split by family: a recipe or a sweep with all
its sizes and slices. Within a generation, families are ordered by sha256(name). A family is sealed, unless the
development side with it has at most a third as many runs as the sealed side. tpu_split.csv has the side of each run and
the hash of its job. Both files were committed before any of these runs was predicted, and a test compares their hashes.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flags
from flags import Flags, parsed
from runs import Run

from forerun.hardware.slices import slice_named
from forerun.planner.compile.request import CompileRequest

HERE = Path(__file__).resolve().parent
PUBLISHED, SPLIT = HERE / "unused_published.csv", HERE / "tpu_split.csv"
SEALED, DEVELOPMENT = "sealed", "development"
SHARE = 3  # sealed runs for each development run


@dataclass(frozen=True)
class UnusedRun(Run):
    """A run of unused_published.csv."""

    def question(self) -> CompileRequest:
        """Return the compile request. A model that is a folder of bench/configs is found from any working folder."""
        model = self.job["model"]
        if isinstance(model, str) and model.startswith("configs/"):
            found = Run(**{**vars(self), "job": {**self.job, "model": str(HERE.parent / model)}})
            return found.question()
        return super().question()


def _dims(
    layers: int, embed: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool = False, **more: Any
) -> dict[str, Any]:
    sizes = {"layers": layers, "embed": embed, "heads": heads, "kv_heads": kv_heads, "head_dim": embed // heads}
    return sizes | {"mlp": mlp, "vocab": vocab, "tied": tied} | more


def _marin(layers: int, embed: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> dict[str, Any]:
    return _dims(layers, embed, heads, kv_heads, mlp, 128_256, **more)


MODELS: dict[str, dict[str, Any]] = {
    "llama2-70b": _dims(80, 8192, 64, 8, 28672, 32000),
    "fuji-7b": _dims(32, 4096, 32, 32, 11008, 32768, tied=True),
    "fuji-70b": _dims(80, 8192, 64, 8, 28672, 32768),
    "honeycrisp-3b": _dims(26, 3072, 24, 8, 8064, 49152, tied=True, qk_norm=True),
    **{
        f"marin-{kind}-{size}": _marin(*sizes, **norm)
        for kind, norm in (("llama", {}), ("qwen3", {"qk_norm": True}))
        for size, sizes in (
            ("200m", (7, 640, 5, 5, 2560)),
            ("400m", (10, 896, 7, 7, 3584)),
            ("800m", (15, 1408, 11, 11, 5632)),
            ("1_2b", (16, 2048, 16, 8, 7168)),
        )
    },
}

_AXLEARN = "apple/axlearn@34aed43c:axlearn/common/compiler_options.py, of a later date than the runs"
_AXLEARN_COMMON = "--xla_tpu_enable_latency_hiding_scheduler=true --xla_tpu_perform_spmd_cse_prevention=false"
_AXLEARN_FLAGS = {
    "v4": "--xla_enable_async_all_gather=true --xla_enable_async_collective_permute=true",
    "v5e": "",
    "v5p": "--xla_tpu_use_tc_device_shape_on_sc=true --xla_sc_enable_instruction_fusion=false "
    "--xla_sc_disable_megacore_partitioning=true --xla_tpu_scoped_vmem_limit_kib=65472 "
    "--xla_enable_async_all_gather=true --xla_enable_async_collective_permute=true",
    "v6e": "--xla_tpu_host_transfer_overlap_limit=24 --xla_max_concurrent_host_send_recv=100 "
    "--xla_latency_hiding_scheduler_rerun=2 --xla_tpu_scoped_vmem_limit_kib=98304 "
    "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000 --xla_tpu_use_tc_device_shape_on_sc=true "
    "--xla_sc_enable_instruction_fusion=false --xla_sc_disable_megacore_partitioning=true "
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true --xla_tpu_enable_async_collective_fusion=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_enable_async_all_gather=true --xla_tpu_enable_all_experimental_scheduler_features=true "
    "--xla_tpu_enable_scheduler_memory_pressure_tracking=true --xla_tpu_aggressive_opt_barrier_removal=ENABLED "
    "--xla_lhs_prioritize_async_depth_over_stall=ENABLED --xla_tpu_enable_ag_backward_pipelining=true "
    "--xla_should_allow_loop_variant_parameter_in_chain=ENABLED --xla_should_add_loop_invariant_op_in_chain=ENABLED",
}
_SCATTER = (
    "--xla_tpu_use_minor_sharding_for_major_trivial_input=true "
    "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 --xla_tpu_assign_all_reduce_scatter_layout=true"
)
_PARALLEL = "--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true"
_GATHER = (
    "--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_enable_async_all_gather=true"
)
_SPARSE_CORE = (
    "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=false "
    "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true --xla_tpu_use_tc_device_shape_on_sc=true "
    "--xla_sc_enable_instruction_fusion=false --xla_sc_disable_megacore_partitioning=true"
)
_GEMMA4 = (
    "--xla_tpu_scoped_vmem_limit_kib=65536 --xla_tpu_bf16_emission_mode=NATIVE_EMISSION "
    "--xla_tpu_enable_sparse_core_reduce_scatter_v2=true "
    "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true "
    "--xla_tpu_enable_sparse_core_collective_offload_2d_all_gather=true "
    "--xla_tpu_enable_sparse_core_collective_offload_3d_all_gather=true "
    "--xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter=true "
    "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true "
    "--xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true "
    "--xla_tpu_use_single_sparse_core_for_all_gather_offload=true --xla_tpu_use_tc_device_shape_on_sc=true "
    "--xla_sc_disable_megacore_partitioning=true --xla_enable_async_all_gather=true "
    "--xla_tpu_prefer_async_allgather_to_allreduce=true --xla_tpu_enable_latency_hiding_layer_scheduler=true "
    "--xla_tpu_enable_layer_scheduler_for_dependent_collectives=true "
    "--xla_tpu_scheduler_percent_shared_memory_limit=150 --xla_tpu_enable_sparse_core_collective_aggregator=true "
    "--xla_tpu_enable_all_gather_offload_tracing=true"
)
_IRONWOOD = "AI-Hypercomputer/tpu-recipes@c8cfe2f:training/ironwood"
FLAGS: dict[str, Flags] = {
    "MARIN": flags.MARIN,
    "MARIN_LATER": flags.MARIN_LATER,
    "NONE": Flags("its script sets no flags: the compiler's defaults"),
    "UNKNOWN": Flags("its source says only that collectives are asynchronous: the compiler's defaults"),
    "MAXTEXT_V5P": Flags(
        "AI-Hypercomputer/maxtext@92e59fdf:benchmarks/xla_flags_library.py", parsed(f"{_PARALLEL} {_GATHER}")
    ),
    "GEMMA3_V6E": Flags(
        "AI-Hypercomputer/tpu-recipes@c8cfe2f:training/trillium/Gemma3-12B-MaxText/v6e-256/README.md",
        parsed("--xla_tpu_scoped_vmem_limit_kib=122880"),
    ),
    "TORCHPRIME_256": Flags(
        "AI-Hypercomputer/torchprime@d0d7f36:torchprime/torch_xla_models/README.md",
        parsed(f"--xla_tpu_scoped_vmem_limit_kib=98304 {_SCATTER} {_PARALLEL} {_GATHER} {_SPARSE_CORE}"),
    ),
    "GEMMA4_SMALL": Flags(f"{_IRONWOOD}/gemma4-2b/8k-bf16-tpu7x-4x4x4/xpk/run_recipe.sh", parsed(_GEMMA4)),
    "GEMMA4_31B": Flags(f"{_IRONWOOD}/gemma4-31b/8k-bf16-tpu7x-4x4x4/xpk/run_recipe.sh", parsed(_GEMMA4)),
}
# Block lengths of recipes that set them, rounded to forerun's one length for all kernels.
KERNELS: dict[str, dict[str, Any]] = {
    "gemma3-12b v6e-256": {"name": "splash", "block": 1024},
    "gemma4-e2b tpu7x-4x4x4": {"name": "splash", "block": 1024, "fused_backward": True},
    "gemma4-e4b tpu7x-4x4x4": {"name": "splash", "block": 1024, "fused_backward": True},
    "gemma4-31b-1024 tpu7x-4x4x4": {"name": "splash", "block": 1024, "fused_backward": True},
    "gemma4-31b-512 tpu7x-4x4x4": {"name": "splash", "block": 2048, "fused_backward": True},
    "fuji-7b-v2 v5p-512": {"name": "splash", "block": 512},
    "fuji-70b-v2 v5p-1024": {"name": "splash", "block": 512},
    "fuji-70b-v2 v6e-256": {"name": "splash", "block": 1024},
    **{f"honeycrisp-3b v5p-{cores}": {"name": "splash", "block": 512} for cores in (1024, 2048, 4096)},
}
PEAK_TFLOPS = {"v4": 275}  # for MFU, as its source counts it


def rows() -> list[dict[str, str]]:
    with PUBLISHED.open() as file:
        return list(csv.DictReader(file))


def unused_runs() -> list[Run]:
    """Return every unused run that forerun can describe, sealed and development."""
    return [_run(row) for row in rows() if row["model"]]


def sealed_runs() -> list[Run]:
    """Return the runs that nothing predicts before the end."""
    return [run for run in unused_runs() if side_of()[run.family] == SEALED]


def development_runs() -> list[Run]:
    """Return the unused runs that may be predicted once the split is committed."""
    return [run for run in unused_runs() if side_of()[run.family] == DEVELOPMENT]


def _run(row: dict[str, str]) -> Run:
    seconds, derived = _seconds(row)
    return UnusedRun(
        row["name"],
        row["family"],
        row["slice"],
        seconds,
        row["source"],
        _job(row),
        derived,
        row["note"],
        row["unlike"],
        _flags(row),
        KERNELS.get(row["name"]),
    )


def _flags(row: dict[str, str]) -> Flags:
    if row["flags"] == "AXLEARN":
        return Flags(_AXLEARN, parsed(f"{_AXLEARN_COMMON} {_AXLEARN_FLAGS[slice_named(row['slice']).chip.name]}"))
    return FLAGS[row["flags"]]


def _seconds(row: dict[str, str]) -> tuple[float, str]:
    """Return the seconds per step, and how they follow from what was published."""
    published, machine = float(row["published"]), slice_named(row["slice"])
    tokens = int(row["batch"]) * int(row["sequence"]) / machine.chips
    if row["unit"] == "seconds":
        return published, ""
    if row["unit"] == "tokens/s/chip":
        return tokens / published, f"{tokens:,.0f} tokens per chip / {published:g} tokens/s"
    assert row["unit"] == "% MFU, 6 N", row
    work, peak = 6.0 * weights(MODELS[row["model"]]) * tokens, PEAK_TFLOPS[machine.chip.name]
    return work / (published / 100 * peak * 1e12), f"6 N x {tokens:,.0f} / ({published:g} % of {peak} TFLOP/s)"


def weights(model: dict[str, Any]) -> int:
    """Return the number of weights without norms. A tied embedding counts once."""
    heads = 2 * model["heads"] + 2 * model["kv_heads"]
    layer = model["embed"] * (heads * model["head_dim"] + 3 * model["mlp"])
    return model["layers"] * layer + model["vocab"] * model["embed"] * (1 if model["tied"] else 2)


def _job(row: dict[str, str]) -> dict[str, Any]:
    job: dict[str, Any] = {
        "model": MODELS.get(row["model"], row["model"]),
        "sequence": int(row["sequence"]),
        "batch": int(row["batch"]),
        "mesh": {axis: int(row[axis]) for axis in ("data", "fsdp", "tp")},
        "remat": _remat(row["remat"]),
        "precision": {"params": row["params"]},
        "optimizer": {"name": row["optimizer"]},
        "attention": row["attention"],
    }
    if row["micro_batch"]:
        job["micro_batch"] = int(row["micro_batch"])
    if row["unroll"]:
        job["unroll"] = True
    return job


def _remat(text: str) -> Any:
    """Return the remat section: one word is a policy; `keep a b offload c` names residuals."""
    words = text.split()
    if len(words) == 1:
        return text
    lists: dict[str, list[str]] = {"keep": [], "offload": []}
    found = lists["keep"]
    for word in words:
        if word in lists:
            found = lists[word]
        else:
            found.append(word)
    return {"policy": "named", **lists}


def side_of() -> dict[str, str]:
    """Return family -> sealed or development."""
    found: dict[str, str] = {}
    all_runs = unused_runs()
    for generation in sorted({run.generation for run in all_runs}):
        sizes = Counter(run.family for run in all_runs if run.generation == generation)
        taken = {SEALED: 0, DEVELOPMENT: 0}
        for family in sorted(sizes, key=_digest):
            side = DEVELOPMENT if SHARE * (taken[DEVELOPMENT] + sizes[family]) <= taken[SEALED] else SEALED
            found[family] = side
            taken[side] += sizes[family]
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def split_table() -> str:
    """Return the content of tpu_split.csv: the side of each run, its seconds and the hash of its job."""
    side = side_of()
    lines = [
        f"{run.generation},{run.family},{side[run.family]},{run.name},{run.seconds:.4f},"
        f"{_digest(json.dumps(run.job, sort_keys=True))[:16]}"
        for run in unused_runs()
    ]
    return "\n".join(["generation,family,side,run,seconds,job", *sorted(lines)]) + "\n"


def main() -> int:
    SPLIT.write_text(split_table())
    for path in (PUBLISHED, SPLIT):
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
