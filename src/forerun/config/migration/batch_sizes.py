"""Batch sizes. Other trainers count sequences per device and per pass; `batch` counts them over all devices."""

from __future__ import annotations

from typing import Any

from forerun.config.migration.conversion import (
    Conversion,
    ForeignValues,
    converted,
    to,
    unneeded,
    unsupported,
    whole_in,
)

PER_DEVICE = (
    "per_device_train_batch_size micro_batch_size per_device_batch_size local_batch_size per_device_parallelism "
    "device_batch_size train_micro_batch_size_per_gpu per_gpu_train_batch_size batch_size_per_device"
)
ACCUMULATION = (
    "gradient_accumulation_steps accumulation_steps grad_accum grad_accum_steps accumulate_grad_batches accumulation"
)
GLOBAL = "global_batch_size train_batch_size global_train_batch_size total_batch_size"
DEVICES = "devices num_processes nprocs num_chips tpu_num_cores nproc_per_node num_devices gpu_count world_size"
JOB_BATCH = 32  # the default of `batch`


def device_count(given: ForeignValues) -> int | None:
    """Return the number of devices of a configuration, or None if it does not say."""
    return given.devices or whole_in(given.first(DEVICES)) or None


def batch(value: Any, given: ForeignValues) -> Conversion:
    """Convert any of the keys that together decide the batch: per device, accumulation, or in total."""
    per_device, total = given.number(PER_DEVICE), whole_in(given.first(GLOBAL))
    accumulation = whole_in(given.first(ACCUMULATION)) or 1
    plain = whole_in(given.first("batch_size"))
    if plain and not per_device and given.first(ACCUMULATION) is not None:
        per_device = plain  # a script that accumulates batches counts one pass
    elif plain and not total:
        total = plain
    if whole_in(value) == -1:
        return unneeded("-1 means that it follows from other keys")
    if total and total > 0:
        return _of_total(total, per_device, accumulation, given)
    if per_device and per_device > 0:
        return _of_device(per_device, accumulation, given)
    return _of_accumulation(accumulation, given)


def _of_total(total: int, per_device: float | None, accumulation: int, given: ForeignValues) -> Conversion:
    devices = device_count(given) or 1
    micro = per_device if per_device and per_device > 0 else total / accumulation / devices
    note = "batch counts sequences over all devices"
    if (per_device or accumulation > 1) and micro == int(micro) and micro >= 1 and total % (micro * devices) == 0:
        return converted(f"{note}, micro_batch those of one device in one pass", batch=total, micro_batch=int(micro))
    return to("batch", total, note)


def _of_device(per_device: float, accumulation: int, given: ForeignValues) -> Conversion:
    known = device_count(given)
    total = per_device * accumulation * (known or 1)
    if total != int(total):
        return unsupported(f"{per_device:g} per device is not a whole batch: write batch, over all devices")
    factors = f"{per_device:g} per device x {accumulation} accumulated x {known or 1} device{'s' * ((known or 1) > 1)}"
    guess = "" if known else "; for N devices multiply it by N"
    note = f"batch counts sequences over all devices: {factors} = {int(total)}{guess}"
    if per_device != int(per_device):
        return to("batch", int(total), note)
    return converted(note, batch=int(total), micro_batch=int(per_device))


def _of_accumulation(accumulation: int, given: ForeignValues) -> Conversion:
    total = whole_in(given.first("batch")) or JOB_BATCH
    devices = device_count(given) or 1
    if accumulation == 1:
        return unneeded("without micro_batch, nothing is accumulated")
    if total % (accumulation * devices):
        return unsupported(f"batch {total} is not divisible by {accumulation} x {devices} devices: write micro_batch")
    micro = total // accumulation // devices
    note = f"micro_batch is batch / accumulation / devices: {total} / {accumulation} / {devices}"
    return to("micro_batch", micro, note)
