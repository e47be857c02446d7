"""Conversions of values about adapters, preferences, templates and packing."""

from __future__ import annotations

from typing import Any

from forerun.config.migration.conversion import (
    Conversion,
    Convert,
    ForeignValues,
    accepts,
    converted,
    flag_in,
    impossible,
    number_in,
    to,
    unneeded,
    unsupported,
    whole_in,
)

RANKS = "lora_r lora_rank recovery_r r"
TRL_RANK = 16  # of TRL's ModelConfig
NO_LORA = "no adapter is trained"


def uses_adapter(given: ForeignValues) -> bool:
    """Return whether a configuration trains adapters. Without a switch, a rank means that it does."""
    switch = given.first("adapter use_peft")
    if switch is None:
        return not ({"adapter", "use_peft"} & set(given.values)) and given.first(RANKS) is not None
    return flag_in(switch) is not False and str(switch).lower() not in ("none", "")


def adapter(value: Any, given: ForeignValues) -> Conversion:
    """Convert the kind of adapter: lora, qlora, or true."""
    name, rank = str(value).lower(), whole_in(given.first(RANKS)) or TRL_RANK
    if name in ("none", "false", ""):
        return unneeded("all weights are trained")
    if name == "qlora":
        return converted(lora__rank=rank, lora__base="nf4")
    if name in ("lora", "true"):
        return to("lora.rank", rank)
    return impossible(f"forerun has no adapter '{name[:40]}'; it trains LoRA, QLoRA, rsLoRA, DoRA or all weights")


def in_four_bits(value: Any, given: ForeignValues) -> Conversion:
    """Convert 4-bit loading, which means QLoRA."""
    if not flag_in(value):
        return unneeded("it is off")
    return to("lora.base", "nf4", "QLoRA: the frozen weights have 4 bits")


def in_eight_bits(value: Any, given: ForeignValues) -> Conversion:
    """Convert 8-bit loading of the frozen weights."""
    if not flag_in(value):
        return unneeded("it is off")
    return to("lora.base", "int8", "the frozen weights have 8 bits")


def quantization_type(value: Any, given: ForeignValues) -> Conversion:
    """Convert the 4-bit type of bitsandbytes."""
    if "load_in_4bit" in given.values and not flag_in(given.first("load_in_4bit")):
        return unneeded("load_in_4bit is off")
    return to("lora.base", "nf4") if str(value).lower() == "nf4" else unsupported("lora.base has nf4 and int4, not fp4")


def targets(value: Any, given: ForeignValues) -> Conversion:
    """Convert the weights that get adapters. The names of PEFT are understood."""
    names = value if isinstance(value, list) else [value]
    if not names:
        return unneeded("all matrices except the output layer get adapters")
    listed = [str(name) for name in names]
    return to("lora.targets", "all-linear" if listed == ["all-linear"] else listed)


def integer_type(key: str) -> Convert:
    """Return a conversion of an integer type for quantization-aware training."""

    def convert(value: Any, given: ForeignValues) -> Conversion:
        name = str(value).lower().removeprefix("torch.").removeprefix("u")
        return to(key, name) if name in ("int4", "int8") else unsupported(f"{key} is an integer type")

    return convert


def special_tokens(value: Any, given: ForeignValues) -> Conversion:
    """Convert special tokens, of which only the one for padding is not needed."""
    if not value or (isinstance(value, dict) and set(value) == {"pad_token"}):
        return unneeded("rows are filled with documents, and padding has no loss")
    return unsupported("the tokenizer of the checkpoint is used unchanged")


def new_tokens(value: Any, given: ForeignValues) -> Conversion:
    """Convert tokens that are added to the tokenizer."""
    listed = [str(token) for token in value] if isinstance(value, list) else [str(value)]
    if accepts({"model.new_tokens": listed}):
        return to("model.new_tokens", listed)
    return unsupported("the tokenizer of the checkpoint is used unchanged")


def plugins(value: Any, given: ForeignValues) -> Conversion:
    """Convert plugins of axolotl. Those with faster kernels are not needed."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if all(any(kernel in name for kernel in ("liger", "cut_cross_entropy", "kernels")) for name in names):
        return unneeded("XLA fuses operations, and loss_chunk limits the logits")
    return unsupported("plugins of axolotl do not run here")


def preference_loss(value: Any, given: ForeignValues) -> Conversion:
    """Convert the loss of DPO and related methods."""
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    if names and all(name in ("nll", "chunked_nll") for name in names):
        return unneeded("the loss of next-token prediction is the default")
    if names == ["sigmoid"]:
        return preference("dpo", given)
    if names == ["ipo"]:
        return preference("ipo", given)
    return impossible("preferences.loss is dpo (sigmoid elsewhere), ipo or cdpo")


def preference(value: Any, given: ForeignValues) -> Conversion:
    """Convert the method that learns from preferences. Label smoothing is a separate loss, cdpo."""
    name = str(value).lower()
    smoothing = number_in(given.first("label_smoothing dpo_label_smoothing")) or 0
    if name == "dpo" and smoothing > 0:
        return converted(
            "with label smoothing, DPO is cdpo", preferences__loss="cdpo", preferences__smoothing=smoothing
        )
    if name in ("dpo", "ipo"):
        return to("preferences.loss", name)
    return impossible(f"forerun does not train '{name[:40]}'; preferences.loss is dpo, ipo or cdpo")


def beta(value: Any, given: ForeignValues) -> Conversion:
    """Convert the strength of the reference. Trainers with rewards have a key of this name, too."""
    if given.first("loss_type rl") is None:
        return unsupported("preferences.beta belongs to DPO; set preferences.loss, too")
    found = number_in(value)
    return unsupported("this is not a number") if found is None else to("preferences.beta", found)


def smoothing(value: Any, given: ForeignValues) -> Conversion:
    """Convert the label smoothing of DPO."""
    return preference("dpo", given) if (number_in(value) or 0) > 0 else unneeded("it is off")


def reference(value: Any, given: ForeignValues) -> Conversion:
    """Convert whether the log-probabilities of the reference are computed once, before the first step."""
    return to("preferences.reference", "cached") if flag_in(value) else unneeded("auto chooses")


def packing(value: Any, given: ForeignValues) -> Conversion:
    """Convert packing. Complete documents share a row, but no document sees another, so padding is not needed."""
    found = flag_in(value)
    if found is None:
        return unsupported("data.packing is auto, concatenate or whole")
    if found and str(given.first("packing_strategy")).lower() == "wrapped":
        return to("data.packing", "concatenate")
    return to("data.packing", "whole", "documents share a row and do not see each other")


def template(value: Any, given: ForeignValues) -> Conversion:
    """Convert the chat template: a name of axolotl, or a file."""
    name = str(value)
    if name in ("tokenizer_default", "jinja"):
        return unneeded("the template of the checkpoint is the default")
    if name == "chatml" or name.endswith((".jinja", ".jinja2", ".j2", ".txt")):
        return to("data.chat_template", name)
    return unsupported("the template of the checkpoint is used; for another one, write a Jinja file")


def system_prompt(value: Any, given: ForeignValues) -> Conversion:
    """Convert a system prompt for all conversations."""
    if accepts({"data.system": str(value)}):
        return to("data.system", str(value))
    return unsupported("write the system prompt into the conversations")
