"""The `experts` section of a job: losses on the routers of a model with experts."""

from __future__ import annotations

from forerun.config.section import Section, about


class Experts(Section):
    """Losses on the routers of a model with experts, for next-token prediction."""

    balance_loss: float | None = about(
        "coefficient of the loss that spreads tokens over the experts",
        "router_aux_loss_coef in config.json; 0 with lora, whose routers are frozen, and with other objectives",
        None,
        ge=0,
        le=1e6,
    )
    z_loss: float | None = about(
        "coefficient of the loss that keeps the routers' logits small", "0: published models do without it", None,
        ge=0, le=1e6,
    )  # fmt: skip

    @property
    def given(self) -> str | None:
        """The first key that is set to a loss, or None."""
        return next((name for name in ("balance_loss", "z_loss") if getattr(self, name)), None)
