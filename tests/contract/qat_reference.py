"""Quantization-aware training in plain torch: transformers' own model with its linear layers rounded by
parametrizations, and the paper's two tricks for learned scales. Shares nothing with forerun.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def rounded_model(folder: Path, qat: Any) -> Any:
    """The checkpoint in `folder` with every linear layer but the read-out rounded as the job's `qat` says."""
    import torch
    import transformers

    bits, group, learned = {"int4": 4, "int8": 8}[qat.weights], qat.group, qat.scales == "learned"
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    class Rounded(torch.nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.log_scale = torch.nn.Parameter(self.computed(weight.detach()).log()) if learned else None

        def computed(self, weight: Any) -> Any:
            parts = weight.reshape(len(weight), -1, group or weight.shape[1])
            return (parts.abs().amax(2) / ((high - low) / 2)).to(torch.bfloat16).float()

        def forward(self, weight: Any) -> Any:
            parts = weight.reshape(len(weight), -1, group or weight.shape[1])
            if self.log_scale is None:
                scale = self.computed(weight.detach())[:, :, None]
                made = parts + ((parts / scale).round().clamp(low, high) * scale - parts).detach()
                return made.reshape(weight.shape)
            scale = self.log_scale.exp()
            scale = scale + (scale.to(torch.bfloat16).float() - scale).detach()
            share = 1 / (parts.shape[2] * high) ** 0.5
            scale = ((scale - scale * share).detach() + scale * share)[:, :, None]
            steps = (parts / scale).clamp(low, high)
            return (((steps.round() - steps).detach() + steps) * scale).reshape(weight.shape)

    def tokens(module: Any, given: Any) -> Any:
        (x,) = given
        step = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127.5
        return (x + ((x / step).round().clamp(-127, 127) * step - x).detach(),)

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            torch.nn.utils.parametrize.register_parametrization(module, "weight", Rounded(module.weight))
            if qat.activations:
                module.register_forward_pre_hook(tokens)
    return model


def recovering_model(folder: Path, qat: Any, adapter: Path, factor: float) -> Any:
    """The checkpoint in `folder` with every linear layer but the read-out rounded once and for all, and beside each the
    adapter of the PEFT folder, which alone learns. An adapter reads its input as it is, rounded or not."""
    import torch
    import transformers
    from safetensors.torch import load_file

    high = {"int4": 7, "int8": 127}[qat.weights]

    def resting(weight: Any) -> Any:
        parts = weight.detach().split(qat.group or weight.shape[1], dim=1)
        scales = [(part.abs().max(1, keepdim=True).values / (high + 0.5)).bfloat16().float() for part in parts]
        codes = [
            torch.clamp(torch.round(part / scale), -high - 1, high) for part, scale in zip(parts, scales, strict=True)
        ]
        return torch.cat([code * scale for code, scale in zip(codes, scales, strict=True)], 1)

    class Recovering(torch.nn.Module):
        def __init__(self, linear: Any, down: Any, up: Any) -> None:
            super().__init__()
            self.register_buffer("weight", resting(linear.weight))
            self.down, self.up = torch.nn.Parameter(down.clone()), torch.nn.Parameter(up.clone())

        def forward(self, x: Any) -> Any:
            read = x
            if qat.activations:
                step = x.abs().amax(-1, keepdim=True).detach() / 127.5
                read = x + (torch.clamp(torch.round(x / step), -127, 127) * step - x).detach()
            return read @ self.weight.T + factor * (x @ self.down.T @ self.up.T)

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).requires_grad_(requires_grad=False)
    halves = load_file(adapter / "adapter_model.safetensors")
    linear = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name != "lm_head"]
    assert len(halves) == 2 * len(linear)
    for name in linear:
        parent, _, own = name.rpartition(".")
        down, up = (halves[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        within = model.get_submodule(parent)
        setattr(within, own, Recovering(getattr(within, own), down, up))
    return model
