"""Common problems of training on TPUs and GPUs, with their causes and fixes in forerun.

Those of TPUs come from the troubleshooting sections of five guides, with outdated facts corrected. Those of GPUs are
messages of jax, CUDA and NCCL.
`docs/reference/doctor.md` has the same table, and `python -m forerun.doctor.symptoms` prints it.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from forerun.hardware.tpu_hosts import EVERYWHERE


@dataclass(frozen=True)
class Symptom:
    """A row of the table."""

    symptom: str
    cause: str
    fix: str


SYMPTOMS = (
    Symptom(
        "no TPU is found, jax shows CPU",
        "Not a TPU machine, libtpu missing, `JAX_PLATFORMS` set, or another process has the TPU.",
        "`forerun doctor` reports the cause. In a notebook choose the TPU runtime and restart. `device: tpu` in the "
        "job turns a silent fallback into an error.",
    ),
    Symptom(
        "torch_xla is not found or does not install",
        "Guides for torch_xla 2.0 to 2.5 are stale: its last release is 2.9.0, and `cloud-tpu-client` is from 2020.",
        "Install forerun with its `tpu` extra: it runs on jax and needs no torch. `forerun doctor` prints the command "
        "if libtpu is missing.",
    ),
    Symptom(
        "a v6e-1 (Colab v6e) shows 1 device, not 8",
        "This is correct: v6e-1 is one chip with one TensorCore. Names of v5e and v6e count chips.",
        "`mesh: {data: 1, fsdp: 1, tp: 1}`, or leave `mesh` out. A 2x2x2 mesh needs v6e-8.",
    ),
    Symptom(
        "a v4-8 or v5p-8 shows 4 devices, not 8",
        "Their names count TensorCores, two per chip, and jax shows one device per chip. v2-8 and v3-8 do show 8.",
        "Plan for 4 devices. `forerun hardware slices` lists chips and devices of every name.",
    ),
    Symptom(
        "the TPU cannot be created: version, size or zone refused",
        "v6e needs the runtime version `v2-alpha-tpuv6e`; there is no `--tpu-size`; us-central2-b is a v4 zone.",
        "`forerun hardware prices` lists zones by chip, `forerun hardware slices` the sizes.",
    ),
    Symptom(
        "nothing happens for minutes at the start",
        "The first step is being compiled: 20 to 75 seconds for a usual step. The 15 to 30 minutes of older "
        "guides come from several torch_xla graphs.",
        "forerun shows the time of tracing, lowering and compiling, and caches the result for the next start.",
    ),
    Symptom(
        "every step takes minutes, or step 2 compiles again",
        "A shape, dtype or layout changes between steps, so the program is compiled again.",
        "forerun compiles the step once. A second compilation stops the run with the name of the argument that "
        "changed. There is no `mark_step` and no `zero_grad` to get wrong.",
    ),
    Symptom(
        "nothing happens at all, on one of several hosts",
        "A program started on one host of a slice waits for the others. 16 and more v5e or v6e chips are several "
        "hosts.",
        f"Start the same command on every host: `{EVERYWHERE}`. `--host auto` reads the host's number from the TPU; "
        "every host needs the job, the data and the secret (docs/how-to/hosts.md). `forerun doctor` reports how many "
        "exist.",
    ),
    Symptom(
        "RESOURCE_EXHAUSTED, out of memory",
        "Weights, gradients, Adam's two moments and activations count, not weights alone: 12 bytes per parameter "
        "before gradients. A v6e has 31.25 GiB to use, a v5e 15.75, and jax uses 90 % of a GPU's memory.",
        "`forerun plan job.yaml --on v6e-1` shows beforehand what fills the memory. Then: smaller `micro_batch` "
        "(the batch stays the same), `remat: full`, more `mesh.fsdp`, shorter `sequence`. Fewer accumulation "
        "steps do not save memory.",
    ),
    Symptom(
        "the process is killed in the middle",
        "A spot TPU was preempted, or the host ran out of memory.",
        "Run the same command again: it resumes from the newest checkpoint with the same data. `checkpoint.every` "
        "limits how many steps are lost.",
    ),
    Symptom(
        "training is slow, the TPU waits",
        "Data is loaded on the host's CPU, whatever the interconnect; or too many values are fetched from the "
        "device; or the model is too small for the chip.",
        "The progress line shows the share of time spent waiting for data. A tokens/s figure is slow or fast only "
        "for a given model: look at MFU. Fetch less: `log_every=10`.",
    ),
    Symptom(
        "the loss becomes NaN",
        "Learning rate too high, bad token ids, or half precision where it does not belong.",
        "Lower `optimizer.lr`, keep `optimizer.clip: 1.0` and `precision.params: float32`. bfloat16 compute needs "
        "no loss scaling; float16 is not used.",
    ),
    Symptom(
        "the result differs from the GPU's",
        "Guides double the batch, raise the learning rate by 1.2 or stop shuffling on TPUs. The hardware "
        "requires none of this.",
        "forerun uses the same batch, order and learning rate on every device. Accumulation works on TPUs, too.",
    ),
    Symptom(
        "aten::kl_div: autograd kernel not registered for XLA",
        "torch_xla lacks this operation.",
        "Does not occur with jax.",
    ),
    Symptom(
        "the TPU is already in use; libtpu lock file",
        "Only one process at a time can use the TPU: a second notebook or a run left behind holds it.",
        "`forerun doctor` names the process. Remove `/tmp/libtpu_lockfile` only if no process holds it.",
    ),
    Symptom(
        "the first answer of a trained model is slow",
        "Sampling is a separate program, which is compiled at its first call.",
        "The second call is fast, and the cache keeps the program for later starts.",
    ),
    Symptom(
        "it costs more than the guide said",
        "Guides quote the price of one chip for a complete slice, or a spot price. v5e-8 is 8 x 1.20 = 9.60 USD/h in "
        "the US, v6e-1 is 2.70 and v6e-8 21.60 (on demand, 2026-08-21).",
        "`forerun hardware prices`, per chip-hour with date and zone; multiply by chips.",
    ),
    Symptom(
        "a GPU is attached, but jax shows CPU: No visible GPU devices, Unable to load cuDNN",
        "The NVIDIA driver is missing or too old, a container has no access to it, or only the plugins for `plan` are "
        "installed.",
        "`device: gpu` in the job prints the cause with its fix. CUDA 13 needs driver 580 or newer. In a container: "
        "`docker run --gpus all`.",
    ),
    Symptom(
        "no kernel image is available for execution on the device",
        "The CUDA packages have no code for this generation of GPUs. CUDA 13 needs compute capability 7.5 or higher.",
        "Use a newer GPU. For a very new GPU, upgrade jax and its CUDA packages together.",
    ),
    Symptom(
        "CUDNN_STATUS_NOT_INITIALIZED, DNN library initialization failed",
        "Another process uses the GPU's memory, or the driver is too old for cuDNN.",
        "`nvidia-smi` lists processes and the driver. End the other process, or upgrade the driver.",
    ),
    Symptom(
        "NCCL operation failed: unhandled system error",
        "The GPUs or nodes cannot communicate: too little shared memory in a container, a firewall, or another node "
        "failed first.",
        "`NCCL_DEBUG=INFO` prints the cause. In a container: `docker run --shm-size=1g --ulimit memlock=-1`. On "
        "several hosts the supervisors restart the run.",
    ),
)


def listing(width: int = 100) -> str:
    """Return the table as text for a terminal."""
    return "\n\n".join(
        "\n".join(
            [
                entry.symptom,
                *textwrap.wrap(entry.cause, width, initial_indent="  why: ", subsequent_indent="       "),
                *textwrap.wrap(entry.fix, width, initial_indent="  fix: ", subsequent_indent="       "),
            ]
        )
        for entry in SYMPTOMS
    )


if __name__ == "__main__":
    print(listing())
