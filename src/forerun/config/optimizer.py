"""The `optimizer` section of a job: the optimizer, its learning-rate schedule and its parameter groups.

The default of some keys depends on the optimizer or on the schedule. These defaults are filled in when the section is
read, so `Optimizer.lr` is always the value that applies. A key that the optimizer or the schedule does not use is None.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from forerun.config.section import AS_TUPLE, Section, about, is_class_path
from forerun.errors import JobValueError, did_you_mean

Fraction = Annotated[float, Field(ge=0, le=1)]
ScheduleName = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "polynomial", "cosine_restarts"]

ADAMW, MUON, ADAFACTOR, LION, ADAMW8BIT = NAMES = ("adamw", "muon", "adafactor", "lion", "adamw8bit")
OPTIMIZER_KEYS = ("weight_decay", "b1", "b2", "eps", "muon", "options")  # keys that not every optimizer uses
SCHEDULE_KEYS = ("final_lr", "decay", "power", "cycles")  # keys that not every schedule uses


class Muon(Section):
    """Muon's own keys. AdamW trains everything that is not a matrix of a linear layer, with b1, b2 and eps."""

    momentum: Fraction = about("decay of the momentum, with Nesterov's correction", "the reference's", 0.95)
    scale: Literal["rms", "width"] = about(
        "rms: updates of AdamW's size, 0.2 sqrt(max(in, out)); width: sqrt(max(1, out / in))",
        "rms: lr and weight_decay mean the same as for AdamW",
        "rms",
    )


class ParamGroup(Section):
    """Parameters with their own learning rate or weight decay. A parameter belongs to the first group that matches."""

    match: Annotated[str | Annotated[tuple[str, ...], Field(min_length=1)], AS_TUPLE] = about(
        "names of parameters, with wildcards: embed, *norm, q_proj", "no default"
    )
    lr_scale: float = about("factor of the learning rate", "1: the learning rate of the others", 1.0, ge=0)
    weight_decay: float | None = about("weight decay of these parameters", "that of the others", None, ge=0)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The names in `match` as a tuple."""
        return (self.match,) if isinstance(self.match, str) else self.match


class Optimizer(Section):
    """The optimizer with a learning-rate schedule, gradient clipping and an optional moving average."""

    name: str = about(
        f"{', '.join(NAMES)}, or a function or class module.path:Name",
        "AdamW: the common choice",
        ADAMW,
        editors={"anyOf": [{"enum": list(NAMES)}, {"pattern": ":"}]},
    )
    lr: float = about("peak learning rate", "a usual AdamW value for small models", 3e-4, gt=0)
    schedule: ScheduleName = about("shape of the schedule after warm-up", "cosine is the common choice", "cosine")
    warmup: float = about(
        "warm-up: share of the steps, or a number of steps if >= 1", "3 % is enough with AdamW", 0.03, ge=0
    )
    final_lr: Fraction | None = about(
        "final learning rate as a share of lr", "0.1: the model learns until the end", 0.1
    )
    decay: float | None = about(
        "schedule wsd: last steps in which the rate falls, as a share or as a number if >= 1",
        "0.2 with wsd",
        None,
        gt=0,
    )
    power: float | None = about("schedule polynomial: the exponent; 1 is linear", "2 with polynomial", None, gt=0)
    cycles: int | None = about("schedule cosine_restarts: number of cosines", "2 with restarts", None, ge=1, le=100)
    weight_decay: float | None = about(
        "weight decay of matrices, not of norms and biases", "usual for language models", 0.1, ge=0
    )
    b1: Fraction | None = about("decay of the first moment", "AdamW's default", 0.9)
    b2: Fraction | None = about("decay of the second moment", "0.95 is steadier than 0.999 for language models", 0.95)
    eps: float | None = about("AdamW epsilon", "Optax's default", 1e-8, gt=0)
    clip: float | None = about(
        "limit of the global gradient norm; null: no clipping", "1.0 stops rare spikes", 1.0, gt=0
    )
    ema: Fraction | None = about(
        "decay of a moving average of the weights", "off: it needs another copy of the weights", None
    )
    muon: Muon | None = about("keys of name: muon: see below", "other optimizers have none", None)
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of a custom optimizer",
        json_schema_extra={"reason": "only for module.path:Name"},
    )
    groups: Annotated[tuple[Annotated[ParamGroup, Field()], ...], AS_TUPLE] = about(
        "list of {match, lr_scale, weight_decay}: parameters with their own values",
        "all parameters have the same values",
        (),
    )

    @property
    def is_custom(self) -> bool:
        """Whether the optimizer is the user's own function or class."""
        return ":" in self.name

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: Any) -> Any:
        """Fill in the defaults that depend on the optimizer and on the schedule."""
        if not isinstance(value, dict):
            return value
        given = dict(value)
        name, schedule = str(given.get("name", ADAMW)), str(given.get("schedule", "cosine"))
        if ":" in name and "lr" not in given:
            raise JobValueError(
                "E-JOB-093", f"optimizer.name: {name} has no default learning rate", fix="set optimizer.lr"
            )
        for key, (default, _) in changed_defaults(name, schedule).items():
            if given.get(key) is None and (key != "lr" or key not in given):
                given[key] = default
        for key in ("weight_decay", "b1", "b2", "eps", "final_lr"):
            if key in given and given[key] is None and key not in unused_keys(name, schedule):
                del given[key]  # null means the default
        return given

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str) -> str:
        if name in NAMES or is_class_path(name):
            return name
        near = _OTHER_NAMES.get(name.lower()) or did_you_mean(name, NAMES)
        fix = f"did you mean {near}?" if near else f"write one of {', '.join(NAMES)}, or your own module.path:Name"
        raise JobValueError("E-JOB-090", f"optimizer.name: {name!r} is not an optimizer", fix=fix)

    @field_validator(*OPTIMIZER_KEYS)
    @classmethod
    def _used_by_optimizer(cls, value: Any, info: ValidationInfo) -> Any:
        name, key = info.data.get("name"), info.field_name
        if name is not None and value not in (None, {}) and key in unused_keys(name, "cosine"):
            own = "; put the arguments of your optimizer into optimizer.options" if ":" in name else ""
            raise JobValueError("E-JOB-091", f"optimizer.{key}: {name} does not use it", fix=f"remove it{own}")
        return value

    @field_validator(*SCHEDULE_KEYS)
    @classmethod
    def _used_by_schedule(cls, value: Any, info: ValidationInfo) -> Any:
        schedule, key = info.data.get("schedule"), info.field_name
        if schedule is not None and value is not None and key in unused_keys(ADAMW, schedule):
            raise JobValueError(
                "E-JOB-092", f"optimizer.{key}: the schedule {schedule} does not use it", fix="remove it"
            )
        return value

    @model_validator(mode="after")
    def _group_decay(self) -> Optimizer:
        if self.is_custom and any(group.weight_decay is not None for group in self.groups):
            raise JobValueError(
                "E-JOB-094",
                f"optimizer.groups: {self.name} applies its own weight decay",
                fix="remove weight_decay from the groups; a group can set lr_scale only",
            )
        return self


# Names of the same algorithms in other trainers.
_OTHER_NAMES = {
    **dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "fusedadam"), ADAMW),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adam8bit", "adamw_torch_8bit"), ADAMW8BIT),
    **dict.fromkeys(("lion_32bit", "lion_8bit", "paged_lion_8bit"), LION),
}


def unused_keys(name: str, schedule: str) -> frozenset[str]:
    """Return the keys of the section that an optimizer and a schedule do not use.

    `final_lr` counts as used by the schedule constant, which has always accepted it.
    """
    unused = {
        LION: {"eps"},
        ADAFACTOR: {"b1", "b2", "eps"},
    }.get(name, {"weight_decay", "b1", "b2", "eps"} if ":" in name else set())
    unused |= {"muon"} if name != MUON else set()
    unused |= {"options"} if ":" not in name else set()
    unused |= {"decay"} if schedule != "wsd" else set()
    unused |= {"power"} if schedule != "polynomial" else set()
    unused |= {"cycles"} if schedule != "cosine_restarts" else set()
    unused |= {"final_lr"} if schedule == "inverse_sqrt" else set()
    return frozenset(unused)


def changed_defaults(name: str, schedule: str) -> dict[str, tuple[Any, str]]:
    """Return the defaults that differ from those of AdamW with a cosine, each with its reason.

    A key that is not used has None.
    """
    changed: dict[str, tuple[Any, str]] = {
        key: (None, f"{schedule} does not use it" if key in SCHEDULE_KEYS else f"{name} does not use it")
        for key in unused_keys(name, schedule) - {"muon", "options", "decay", "power", "cycles"}
    }
    if name == MUON:
        changed["lr"] = (3e-4, "that of AdamW, because muon.scale rms gives updates of AdamW's size")
        changed["muon"] = ({}, "Muon's own keys")
    if name == LION:
        changed["lr"] = (1e-4, "a third of AdamW's, because each update is a sign (the paper: 3 to 10 times smaller)")
        changed["weight_decay"] = (0.3, "three times AdamW's, so that lr x weight_decay is the same")
        changed["b2"] = (0.99, "the paper's")
    if name == ADAFACTOR:
        changed["lr"] = (1e-2, "a share of each weight's RMS, as for T5 and PaLM; for weights of RMS 0.02 it is 2e-4")
        changed["weight_decay"] = (0.0, "none, as in the paper: lr is relative, so 0.1 would be 30 times AdamW's")
    if schedule == "wsd":
        changed["decay"] = (0.2, "the last 20 % are enough to reach the loss of a cosine")
    if schedule == "polynomial":
        changed["power"] = (2.0, "1 would be linear")
    if schedule == "cosine_restarts":
        changed["cycles"] = (2, "one cycle would be cosine")
    return changed
