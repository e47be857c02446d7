"""Conversions of values that have other names or units in other trainers.

Batch sizes: other trainers count sequences per device and per pass; `batch` counts them over all devices. Trackers: a
trainer may have one key for each tracker. The setting `track.to` has all of them, so each conversion returns the
trackers of the complete configuration.
"""

from __future__ import annotations

import re
from typing import Any

from forerun.config.migration.conversion import (
    Conversion,
    Convert,
    ForeignValues,
    accepts,
    converted,
    flag_in,
    number_in,
    to,
    unneeded,
    unsupported,
    whole_in,
)
from forerun.config.run_sections import TRACKERS
from forerun.storage.address import Address

SCHEDULES = {
    **dict.fromkeys(("cosine", "cosine_with_warmup", "cosine_with_min_lr", "cosine_warmup_with_min_lr"), "cosine"),
    **dict.fromkeys(("constant", "constant_with_warmup", "none"), "constant"),
    **dict.fromkeys(("inverse_sqrt", "inv_sqrt"), "inverse_sqrt"),
    **dict.fromkeys(("warmup_stable_decay", "wsd"), "wsd"),
    "linear": "linear",
    "polynomial": "polynomial",
    "cosine_with_restarts": "cosine_restarts",
}
OPTIMIZERS = {
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion_32bit", "lion_pytorch"), "lion"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw8bit"),
    "adafactor": "adafactor",
    "muon": "muon",
}
ADAMW = re.compile(r"(paged_)?adamw?(_torch(_fused|_xla)?|_hf|_anyprecision|_32bit|_apex_fused|_pax)?")
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "f32": "float32", "float32": "float32"}
HALF = "float16 needs loss scaling; bfloat16 does not, and TPUs since v2 multiply it natively"
DEVICES = {"cuda": "gpu", "gpu": "gpu", "nvidia": "gpu", "rocm": "gpu", "tpu": "tpu", "xla": "tpu", "cpu": "cpu"}
_HUB = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_DATA_ENDINGS = (".txt", ".md", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst")


def schedule(value: Any, given: ForeignValues) -> Conversion:
    """Convert the name of a learning-rate schedule."""
    name = str(value).lower()
    found = SCHEDULES.get(name)
    if found is None:
        return unsupported(f"forerun has no schedule '{name[:40]}'; optimizer.schedule lists its own")
    return to("optimizer.schedule", found)


def optimizer(value: Any, given: ForeignValues) -> Conversion:
    """Convert the name of an optimizer. AdamW is the default of forerun."""
    name = str(value).lower()
    found = OPTIMIZERS.get(name)
    if found is not None:
        return to("optimizer.name", found)
    if ADAMW.fullmatch(name):
        return unneeded("AdamW is the default")
    return unsupported(f"forerun has no optimizer '{name[:40]}'; it trains with AdamW")


def warmup(value: Any, given: ForeignValues) -> Conversion:
    """Convert a share or a number of warm-up steps. A number of steps takes precedence in other trainers."""
    found, count = number_in(value), given.number("warmup_steps num_warmup_steps lr_warmup_steps")
    if found is None or found < 0:
        return unsupported("this is not a number")
    if count and count >= 1 and found < 1:
        return unneeded("a number of warm-up steps is set")
    return to("optimizer.warmup", int(found) if found == int(found) else found)


def final_lr(value: Any, given: ForeignValues) -> Conversion:
    """Convert an absolute final learning rate to a share of the peak."""
    low, peak = number_in(value), given.number("learning_rate lr peak_lr max_lr")
    if low is None:
        return unsupported("this is not a number")
    if low == 0:
        return to("optimizer.final_lr", 0.0)
    if not peak:
        return unsupported("optimizer.final_lr is a share of optimizer.lr, and no learning rate is given")
    return to("optimizer.final_lr", float(f"{low / peak:.6g}"), f"a share of the peak: {low:g} / {peak:g}")


def schedule_arguments(value: Any, given: ForeignValues) -> Conversion:
    """Convert `lr_scheduler_kwargs`, of which the minimum learning rate has a key."""
    names = set(value) if isinstance(value, dict) else set()
    if not names:
        return unneeded("it is not set")
    if names == {"min_lr_rate"}:
        return to("optimizer.final_lr", value["min_lr_rate"])
    if names == {"min_lr"}:
        return final_lr(value["min_lr"], given)
    return unsupported("optimizer.schedule has no such arguments")


def clip(value: Any, given: ForeignValues) -> Conversion:
    """Convert the limit of the gradient norm. 0 means no clipping elsewhere."""
    found = number_in(value)
    if found is None:
        return unsupported("this is not a number")
    return to("optimizer.clip", found) if found > 0 else to("optimizer.clip", None, "null: no clipping")


def ema(value: Any, given: ForeignValues) -> Conversion:
    """Convert a moving average that is only switched on. 0.999 is the usual decay."""
    found = flag_in(value)
    if found is None or (isinstance(value, float) and value > 0):
        return to("optimizer.ema", number_in(value))
    return to("optimizer.ema", 0.999, "the decay of the average") if found else unneeded("it is off")


def bf16(value: Any, given: ForeignValues) -> Conversion:
    """Convert the switch for bfloat16. If float16 is off, too, the other trainer computes in float32."""
    found = True if str(value).lower() in ("auto", "full") else flag_in(value)
    if found:
        return to("precision.compute", "bfloat16", "the default")
    if flag_in(given.first("fp16 float16")):
        return unneeded("fp16 is set")
    return to("precision.compute", "float32", "remove it for bfloat16, which is faster")


def fp16(value: Any, given: ForeignValues) -> Conversion:
    """Convert the switch for float16, which forerun does not use."""
    found = True if str(value).lower() == "auto" else flag_in(value)
    return to("precision.compute", "bfloat16", HALF) if found else unneeded("float16 is never used")


def dtype(key: str) -> Convert:
    """Return a conversion of the name of a dtype."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        name = str(value).lower().removeprefix("torch.").removeprefix("jnp.")
        if name in ("auto", ""):
            return unneeded("bfloat16 is the default for computation, float32 for weights")
        if name in ("float16", "fp16", "half", "f16"):
            return to(key, "bfloat16", HALF)
        found = DTYPES.get(name)
        return to(key, found) if found else unsupported(f"{key} is bfloat16 or float32")

    return convert


def mixed_precision(value: Any, given: ForeignValues) -> Conversion:
    """Convert a policy such as `p=f32,c=bfloat16` or a name such as `bf16`."""
    parts = dict(part.split("=", 1) for part in str(value).replace(" ", "").split(",") if "=" in part)
    if not parts:
        return dtype("precision.compute")(value, given)
    params, compute = (
        DTYPES.get(parts.get("p", parts.get("params", "f32"))),
        DTYPES.get(parts.get("c", parts.get("compute", ""))),
    )
    if params is None or compute is None:
        return unsupported("precision.params and precision.compute are bfloat16 or float32")
    return converted(precision__params=params, precision__compute=compute)


def remat(value: Any, given: ForeignValues) -> Conversion:
    """Convert gradient checkpointing: true, false, or the name of a policy."""
    known = {
        "full": "full",
        "minimal": "dots",
        "selective": "dots",
        "none": "none",
        "unsloth": "full",
        "offload": "full",
    }
    found = flag_in(value)
    policy = known.get(str(value).lower()) if found is None else ("full" if found else "none")
    if policy is None:
        return unsupported("remat.policy is full, dots, none or named")
    return to("remat.policy", policy)


def device(value: Any, given: ForeignValues) -> Conversion:
    """Convert the name of a device, such as `cuda:0`."""
    name = str(value).lower().partition(":")[0]
    if name in ("auto", ""):
        return to("device", "auto")
    if name == "mps":
        return to("device", "cpu", "forerun has no backend for mps")
    found = DEVICES.get(name)
    return to("device", found) if found else unsupported("device is auto, tpu, gpu or cpu")


def device_switch(name: str) -> Convert:
    """Return a conversion of a switch such as `use_tpu`."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        return to("device", name) if flag_in(value) else unneeded("device: auto takes a TPU, then a GPU, then the CPU")

    return convert


def device_number(value: Any, given: ForeignValues) -> Conversion:
    """Convert the number of processes, one per device elsewhere. One process of forerun uses all devices of a host."""
    found = whole_in(value)
    if not found or found < 1:
        return unneeded("one process uses all devices of the host")
    return to("devices", found, "one process uses these devices; without the key it uses all of the host")


def axis(key: str) -> Convert:
    """Return a conversion of a mesh axis. 0 and 1 elsewhere mean that the axis is not used."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        found = whole_in(value)
        return unsupported("this is not a number of devices") if found is None else to(key, found or 1)

    return convert


def one(reason: str) -> Convert:
    """Return a conversion of a mesh axis that forerun does not have. 1 and -1 are not needed."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        return unneeded("forerun has no such axis") if whole_in(value) in (-1, 0, 1) else unsupported(reason)

    return convert


def epochs(value: Any, given: ForeignValues) -> Conversion:
    """Convert a number of epochs. A number of steps takes precedence in other trainers."""
    found = number_in(value)
    if found is None:
        return unsupported("this is not a number")
    if (given.number("max_steps") or 0) > 0:
        return unneeded("max_steps is set")
    return to("epochs", int(found) if found == int(found) else found)


def every(key: str, strategy: str) -> Convert:
    """Return a conversion of an interval in steps, which counts only if the strategy is `steps`."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        found, when = whole_in(value), given.first(strategy)
        if when is not None and str(when).lower() != "steps":
            return unneeded(f"{strategy.split()[0]} is {when}")
        if found is None:
            return unsupported(f"{key} counts steps: a share of the run is not possible")
        return to(key, found) if found > 0 else unneeded("it is not set")

    return convert


def strategy(key: str, default: str) -> Convert:
    """Return a conversion of a strategy: no, steps or epoch."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        if str(value).lower() in ("no", "steps", "false"):
            return unneeded(f"{key} decides")
        return unsupported(f"{key} counts steps; without it, {default}")

    return convert


def share_held_out(value: Any, given: ForeignValues) -> Conversion:
    """Convert the size of the validation part, a share or a number of rows."""
    found = number_in(value)
    if found is None:
        return unsupported("data.validation is a share of the data: the split of a dataset is not read")
    if found >= 1:
        return unsupported("data.validation is a share of the data below 1, not a number of rows")
    return to("data.validation", found) if found > 0 else unneeded("nothing is held out by default")


def output_folder(value: Any, given: ForeignValues) -> Conversion:
    """Convert the folder of the results: a run is written to runs/name."""
    path = str(value).rstrip("/")
    if Address.of(path).is_remote:
        return to("checkpoint.folder", path, "the place of the checkpoints; runs is a folder of this machine")
    parent, _, last = path.rpartition("/")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip(".-")
    settings: dict[str, Any] = {"name": name} if name else {}
    if parent not in ("", ".") or not name:
        settings["runs"] = parent or path or "runs"
    return Conversion(settings, "a run is written to the folder runs/name")


def run_name(value: Any, given: ForeignValues) -> Conversion:
    """Convert the name of a run, which is the name of its folder."""
    if given.first("output_dir") is not None:
        return unneeded("the last part of output_dir is the name")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).lstrip(".-")
    return to("name", name) if name else unsupported("a name consists of letters, digits, '.', '_' and '-'")


def data_path(value: Any, given: ForeignValues) -> Conversion:
    """Convert the path or the hub name of a dataset."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str) or not value:
        return unsupported("data.path is one file, folder, glob or address; several are keys of data.mixture")
    return to("data.path", hub_address(value))


def hub_address(name: str) -> str:
    """Return `hf://datasets/owner/name` for the hub name of a dataset, and a path unchanged."""
    is_path = name.startswith((".", "/", "~")) or name.endswith(_DATA_ENDINGS) or "*" in name
    is_path = is_path or Address.of(name).is_remote
    return f"hf://datasets/{name}" if not is_path and _HUB.fullmatch(name) else name


def to_if_accepted(key: str, value: Any, otherwise: str) -> Conversion:
    """Return a conversion to a key that a version of forerun may not have."""
    found = whole_in(value)
    return to(key, found) if found and accepts({key: found}) else unsupported(otherwise)


PER_DEVICE = (
    "per_device_train_batch_size micro_batch_size per_device_batch_size local_batch_size per_device_parallelism "
    "device_batch_size train_micro_batch_size_per_gpu per_gpu_train_batch_size batch_size_per_device"
)
ACCUMULATION = (
    "gradient_accumulation_steps accumulation_steps grad_accum grad_accum_steps accumulate_grad_batches accumulation"
)
GLOBAL = "global_batch_size train_batch_size global_train_batch_size total_batch_size"
DEVICE_KEYS = "devices num_processes nprocs num_chips tpu_num_cores nproc_per_node num_devices gpu_count world_size"
JOB_BATCH = 32  # the default of `batch`


def device_count(given: ForeignValues) -> int | None:
    """Return the number of devices of a configuration, or None if it does not say."""
    return given.devices or whole_in(given.first(DEVICE_KEYS)) or None


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


LISTS = "report_to log_with loggers"
SWITCHES = {
    "tensorboard": "use_tensorboard enable_tensorboard",
    "mlflow": "use_mlflow",
    "wandb": "wandb use_wandb wandb_project",
    "trackio": "use_trackio trackio_project_name",
}


def tracker(value: Any, given: ForeignValues) -> Conversion:
    """Convert the list of trackers."""
    names = _names(value)
    if not names:
        return unneeded("metrics.jsonl is always written")
    known = [name for name in names if accepts({"track.to": [name]})]
    lost = ", ".join(name for name in names if name not in known)
    reason = f"forerun has no tracker {lost[:60]}; track.to takes {', '.join(TRACKERS)} or module.path:Class"
    if not known:
        return unsupported(reason)
    return converted("", reason if lost else "", track__to=_all(known, given))


def own_tracker(name: str) -> Convert:
    """Return a conversion of a switch that selects a tracker."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        return unneeded("it is off") if flag_in(value) is False else tracker(name, given)

    return convert


def project(name: str) -> Convert:
    """Return a conversion of the name of a project, which selects a tracker."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        selected = tracker(name, given)
        return Conversion({**selected.settings, "track.project": str(value)}, selected.note)

    return convert


def wandb_mode(value: Any, given: ForeignValues) -> Conversion:
    """Convert the mode of wandb, which is not part of a job."""
    return unneeded(f"the client reads it from the environment: WANDB_MODE={str(value)[:20]}")


def _names(value: Any) -> list[str]:
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    return [name for name in names if name not in ("none", "")]


def _all(first: list[str], given: ForeignValues) -> list[str]:
    """Return `first` and all other trackers of the configuration that forerun has."""
    listed = [name for key in LISTS.split() for name in _names(given.values.get(key) or []) if name in TRACKERS]
    switched = [
        name
        for name, keys in SWITCHES.items()
        for value in [given.first(keys)]
        if value is not None and flag_in(value) is not False
    ]
    return sorted({*first, *listed, *switched}, key=[*TRACKERS, *first].index)


# ---- Values that other trainers use for keys of a job, for the error about a wrong value ----

_DTYPE_ALIASES = {name: "float32" for name in ("fp32", "f32", "float", "torch.float32")}
_DTYPE_ALIASES |= {name: "bfloat16" for name in ("bf16", "fp16", "f16", "half", "float16", "torch.bfloat16")}
ALIASES = {
    "device": DEVICES | {"amd": "gpu", "mps": "cpu", "x86": "cpu", "host": "cpu"},
    "precision.params": _DTYPE_ALIASES,
    "precision.compute": _DTYPE_ALIASES,
    "optimizer.schedule": SCHEDULES | {"rsqrt": "inverse_sqrt"},
}


def value_alias(key: str, value: object) -> str | None:
    """Return the value of `key` that `value` of another trainer means, or None. `cuda:0` means the same as `cuda`."""
    aliases, name = ALIASES.get(key, {}), str(value).lower()
    return aliases.get(name) or aliases.get(name.partition(":")[0])
