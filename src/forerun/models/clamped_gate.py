"""The settings of the activation in the experts of gpt-oss. Does not import jax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClampedGate:
    """The function between the matrices of an expert in gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), clamped."""

    alpha: float
    limit: float  # of the gate from above, and of up from both sides
