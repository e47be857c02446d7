"""Conversions of values that have other names or units in other trainers."""

from __future__ import annotations

import re
from typing import Any

from forerun.config.migration.acceptance import accepts, first_accepted
from forerun.config.migration.conversion import (
    Conversion,
    Convert,
    ForeignValues,
    converted,
    flag_in,
    number_in,
    to,
    unneeded,
    unsupported,
    whole_in,
)
from forerun.storage.address import Address

# The choices that forerun has for a name elsewhere, in order of preference. A choice counts once the schema accepts it.
SCHEDULES = {
    "cosine": ("cosine",),
    "cosine_with_warmup": ("cosine",),
    "cosine_with_min_lr": ("cosine",),
    "cosine_warmup_with_min_lr": ("cosine",),
    "linear": ("linear",),
    "constant": ("constant",),
    "constant_with_warmup": ("constant",),
    "none": ("constant",),
    "inverse_sqrt": ("inverse_sqrt",),
    "inv_sqrt": ("inverse_sqrt",),
    "polynomial": ("polynomial",),
    "cosine_with_restarts": ("cosine_restarts", "restarts", "cosine_with_restarts"),
    "warmup_stable_decay": ("wsd",),
    "wsd": ("wsd",),
}
OPTIMIZERS = {
    "adafactor": ("adafactor",),
    "lion": ("lion",),
    "lion_32bit": ("lion",),
    "paged_lion_32bit": ("lion",),
    "lion_pytorch": ("lion",),
    "muon": ("muon",),
    "adamw_8bit": ("adamw8bit",),
    "adamw_bnb_8bit": ("adamw8bit",),
    "paged_adamw_8bit": ("adamw8bit",),
    "adamw_torch_8bit": ("adamw8bit",),
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
    found = first_accepted("optimizer.schedule", SCHEDULES.get(name, ()))
    if found is None:
        return unsupported(f"forerun has no schedule '{name[:40]}'; optimizer.schedule lists its own")
    return to("optimizer.schedule", found)


def optimizer(value: Any, given: ForeignValues) -> Conversion:
    """Convert the name of an optimizer. AdamW is the default of forerun."""
    name = str(value).lower()
    found = first_accepted("optimizer.name", OPTIMIZERS.get(name, ()))
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
