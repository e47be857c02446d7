"""Methods of models with experts: the losses of their routers, and what is rejected before anything is compiled."""

from __future__ import annotations

from forerun.errors import UserError
from forerun.objectives.router_losses import RouterLosses
from forerun.resolve.resolved_job import ResolvedJob


def router_losses(resolved: ResolvedJob) -> RouterLosses:
    """Return the coefficients of the losses of the routers in next-token prediction."""
    job, experts = resolved.job, resolved.model_facts.experts
    if experts is None:
        return RouterLosses()
    published = 0.0 if job.method.trains_adapters else experts.balance_loss
    balance_loss = job.experts.balance_loss
    return RouterLosses(published if balance_loss is None else balance_loss, job.experts.z_loss or 0.0)


def require_experts(resolved: ResolvedJob) -> None:
    """Raise a UserError if the job combines experts with something that forerun does not support."""
    job, experts = resolved.job, resolved.model_facts.experts
    key = job.experts.given
    if experts is None:
        if key is not None:
            raise UserError(
                "E-METHOD-040",
                f"experts.{key} is for a model with experts",
                why=f"{job.model.name or 'the model'} has no routers whose load could be balanced",
                fix=f"remove experts.{key}, or train a model with experts, such as qwen3-30b-a3b",
            )
        return
    if key is not None and (job.objective or job.preferences or job.distil):
        raise UserError(
            "E-METHOD-041",
            f"experts.{key} is not possible with this objective",
            why="only next-token prediction adds the losses of the routers",
            fix=f"remove experts.{key}",
        )
    if job.qat is not None:
        raise UserError(
            "E-METHOD-042",
            "qat is not possible for a model with experts",
            why="forerun does not round the matrices of experts in training",
            fix="remove qat, or train a model without experts",
        )
