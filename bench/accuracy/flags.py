"""Compiler flags of the published runs, each set with the place where its framework or recipe defines it.

Flags of another date may be unknown today. `LEFT_OUT` names the flags that are not passed to the compiler, and why.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LEFT_OUT = {
    "xla_sc_disjoint_spmem": "libtpu 0.0.42 has no such option",
    "2a886c8_chip_config_name": "configures the chip, not the compiler",
    "TPU_MEGACORE": "an environment variable; on v4 and v5p, one device has both cores anyway",
}


@dataclass(frozen=True)
class Flags:
    """The compiler flags of a published run, and where they are written."""

    source: str  # repository@commit:path, or why they are assumed
    values: dict[str, str] = field(default_factory=dict)
    known: bool = True  # False: the source does not say which flags the run had
    alternative: Flags | None = None  # if it is not certain that the run had `values`
    label: str = ""  # of flags that have an alternative, or are one


def parsed(text: str) -> dict[str, str]:
    """Return the flags of a command line, without those in `LEFT_OUT`. The last value of a flag counts."""
    pairs = (word.removeprefix("--").split("=", 1) for word in text.split())
    return {name: value for name, value in pairs if name not in LEFT_OUT}


# MaxText's benchmarks/xla_flags_library.py, from which the recipes for v6e and v5p choose.
_VMEM = "--xla_tpu_scoped_vmem_limit_kib=98304"
_GATHER_FUSION = (
    "--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_enable_async_all_gather=true"
)
_SPARSE_CORE_REDUCE = (
    "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=false "
    "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true --xla_tpu_enable_all_reduce_offload_tracing=true "
    "--xla_tpu_use_tc_device_shape_on_sc=true --xla_sc_enable_instruction_fusion=false --xla_sc_disjoint_spmem=false "
    "--xla_sc_disable_megacore_partitioning=true --2a886c8_chip_config_name=megachip_tccontrol"
)
_SCATTER_LAYOUT = (
    "--xla_tpu_use_minor_sharding_for_major_trivial_input=true "
    "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 --xla_tpu_assign_all_reduce_scatter_layout=true"
)
_DATA_PARALLEL = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true"
)
_HOST_OFFLOAD = (
    "--xla_tpu_enable_all_experimental_scheduler_features=true "
    "--xla_tpu_enable_scheduler_memory_pressure_tracking=true --xla_tpu_host_transfer_overlap_limit=24 "
    "--xla_tpu_aggressive_opt_barrier_removal=ENABLED --xla_lhs_prioritize_async_depth_over_stall=ENABLED "
    "--xla_tpu_enable_ag_backward_pipelining=true --xla_should_allow_loop_variant_parameter_in_chain=ENABLED "
    "--xla_should_add_loop_invariant_op_in_chain=ENABLED --xla_max_concurrent_host_send_recv=100 "
    "--xla_tpu_scheduler_percent_shared_memory_limit=100 --xla_latency_hiding_scheduler_rerun=2"
)
_NO_WINDOWS = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
_NO_BUNDLE_COSTS = "--xla_tpu_use_bundle_aware_cost_model_for_fusions=false"


def _library(commit: str, *sets: str) -> Flags:
    return Flags(f"AI-Hypercomputer/maxtext@{commit}:benchmarks/xla_flags_library.py", parsed(" ".join(sets)))


_DENSE_V6E = (_VMEM, _SCATTER_LAYOUT, _DATA_PARALLEL, _GATHER_FUSION)
TRILLIUM_8B = _library("9f1820b4", *_DENSE_V6E, _SPARSE_CORE_REDUCE, _HOST_OFFLOAD)
TRILLIUM_8B_NO_WINDOWS = _library("9f1820b4", *_DENSE_V6E, _SPARSE_CORE_REDUCE, _HOST_OFFLOAD, _NO_WINDOWS)
TRILLIUM_70B = _library("9f1820b4", *_DENSE_V6E, _HOST_OFFLOAD)
TRILLIUM_70B_NO_WINDOWS = _library("9f1820b4", *_DENSE_V6E, _HOST_OFFLOAD, _NO_WINDOWS)
TRILLIUM_MISTRAL = _library("tpu-recipes-v0.1.2", *_DENSE_V6E, _SPARSE_CORE_REDUCE, _HOST_OFFLOAD, _NO_WINDOWS)
TRILLIUM_LLAMA2 = _library("tpu-recipes-v0.1.2", _VMEM, _GATHER_FUSION, _SPARSE_CORE_REDUCE)
TRILLIUM_GPT3 = _library("tpu-recipes-v0.1.2", _VMEM, _GATHER_FUSION, _DATA_PARALLEL, _NO_BUNDLE_COSTS)
V5P_405B = _library("3eb77db3", _VMEM, _GATHER_FUSION, _HOST_OFFLOAD)

# Recipes for tpu7x, each with its own flags.
_IRONWOOD = "AI-Hypercomputer/tpu-recipes@c8cfe2f:training/ironwood"
IRONWOOD_70B = Flags(
    f"{_IRONWOOD}/llama3.1-70b/8k-bf16-tpu7x-4x4x4/xpk/run_recipe.sh",
    parsed(
        "--xla_tpu_scoped_vmem_limit_kib=61440 --xla_tpu_bf16_emission_mode=NATIVE_EMISSION "
        "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true "
        "--xla_tpu_use_single_sparse_core_for_all_gather_offload=true"
    ),
)
IRONWOOD_405B = Flags(
    f"{_IRONWOOD}/llama3.1-405b/8k-bf16-tpu7x-4x8x8/run_recipe.sh",
    parsed(
        "--xla_tpu_bf16_emission_mode=NATIVE_EMISSION --xla_tpu_enable_sparse_core_reduce_scatter_v2=true "
        "--xla_tpu_use_single_sparse_core_for_all_gather_offload=true "
        "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true "
        "--xla_tpu_enable_sparse_core_collective_offload_2d_all_gather=true "
        "--xla_tpu_enable_sparse_core_collective_offload_3d_all_gather=true "
        "--xla_tpu_enable_all_gather_offload_tracing=true --xla_tpu_use_tc_device_shape_on_sc=true "
        "--xla_sc_disable_megacore_partitioning=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=false "
        "--xla_enable_async_all_gather=true --xla_tpu_prefer_async_allgather_to_allreduce=true "
        "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true "
        "--xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true --xla_tpu_scoped_vmem_limit_kib=65536 "
        "--xla_tpu_enable_sparse_core_offload_queuing_in_lhs=true --xla_tpu_enable_ici_ar_pipelining=true"
    ),
)

# MaxText's scripts of its default sizes, from the commits that published the tables. Those for v5e fuse all-gathers
# with matmuls that do not need them. Today's compiler would split the matmuls that need them into windows, and leave no
# all-gather to fuse. So windows are off there. The compiler's default of 2023 is unknown.
_NO_WINDOWS_EITHER = (
    "--xla_tpu_enable_windowed_einsum_for_all_gather=false --xla_tpu_enable_windowed_einsum_for_reduce_scatter=false"
)
_LARGEST_JOB = "AI-Hypercomputer/maxtext@9bc243c95:MaxText/configs/largest_job/16b.sh to 128b.sh"
DEFAULT_V5E = Flags(
    f"{_LARGEST_JOB}; windowed einsums off",
    parsed(f"{_DATA_PARALLEL} {_GATHER_FUSION} {_NO_WINDOWS_EITHER}"),
    alternative=Flags(
        _LARGEST_JOB, parsed(f"{_DATA_PARALLEL} {_GATHER_FUSION}"), label="windowed einsums by today's default"
    ),
    label="windowed einsums off",
)
_OVERLAP_V5P = (
    "--xla_tpu_megacore_fusion_allow_ags=false --xla_enable_async_collective_permute=true "
    "--xla_tpu_enable_ag_backward_pipelining=true"
)
_FUSION = _GATHER_FUSION.replace("--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true ", "")
DEFAULT_V5P = Flags(
    "AI-Hypercomputer/maxtext@76bd53b0f:MaxText/configs/v5p/32b.sh to 1024b.sh",
    parsed(f"{_OVERLAP_V5P} {_DATA_PARALLEL} {_FUSION}"),
)
DEFAULT_V4 = Flags(
    "AI-Hypercomputer/maxtext@281e04bf3:MaxText/configs/1xv4-128.sh and 1xv4-384.sh",
    parsed("--xla_enable_async_all_gather=true TPU_MEGACORE=MEGACORE_DENSE"),
)

# Marin set LIBTPU_INIT_ARGS for all runs on its clusters until 25 September 2025, and nothing after that. A run of the
# next weeks may have been started from an older checkout.
MARIN = Flags(
    "marin-community/marin@7178fd23:marin/run/vars.py",
    parsed(f"--xla_tpu_scoped_vmem_limit_kib=81920 {_GATHER_FUSION} {_DATA_PARALLEL} {_OVERLAP_V5P}"),
    label="Marin's flags until September 2025",
)
MARIN_LATER = Flags(
    "marin-community/marin@237910db:src/marin/run/vars.py has no flags any more",
    alternative=MARIN,
    label="no flags",
)

COLAB = Flags("a notebook that sets no flags: the compiler's defaults")
