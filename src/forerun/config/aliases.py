"""Values that other trainers use for keys of a job. An error about a wrong value can then suggest the right one.

Names of keys in other trainers are in `config.migration`.
"""

from __future__ import annotations

from forerun.config.migration.values import DEVICES

_DTYPES = {"fp32": "float32", "f32": "float32", "float": "float32", "torch.float32": "float32"}
_DTYPES |= dict.fromkeys(("bf16", "fp16", "f16", "half", "float16", "torch.bfloat16"), "bfloat16")
VALUES = {
    "device": {name: ours for name, ours in DEVICES.items() if name != ours}
    | {"amd": "gpu", "mps": "cpu", "x86": "cpu", "host": "cpu"},
    "precision.params": _DTYPES,
    "precision.compute": _DTYPES,
    "optimizer.schedule": {
        "cosine_with_warmup": "cosine",
        "none": "constant",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
        "cosine_with_restarts": "cosine_restarts",
        "cosine_with_min_lr": "cosine",
        "rsqrt": "inverse_sqrt",
    },
}


def value_alias(key: str, value: object) -> str | None:
    """Return the value of `key` that `value` of another trainer means, or None. `cuda:0` means the same as `cuda`."""
    known, name = VALUES.get(key, {}), str(value).lower()
    return known.get(name) or known.get(name.partition(":")[0])
