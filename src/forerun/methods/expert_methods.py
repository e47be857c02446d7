"""Methods of models with experts: the losses of their routers, and what is rejected before anything is compiled."""

from __future__ import annotations

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.models.decoder_config import DecoderConfig, ExpertConfig
from forerun.models.pretrained import config_of
from forerun.models.sizes import is_plugin
from forerun.objectives.router_losses import RouterLosses


def experts_of(job: Job) -> ExpertConfig | None:
    """Return the experts of the job's model, or None. The experts of a custom class are not known."""
    if is_plugin(job.model):
        return None
    config = config_of(job.model, job.model.vocab or 1)
    return config.experts if isinstance(config, DecoderConfig) else None


def router_losses(job: Job) -> RouterLosses:
    """Return the coefficients of the losses of the routers in next-token prediction."""
    experts = experts_of(job)
    if experts is None:
        return RouterLosses()
    published = 0.0 if job.method.trains_adapters else experts.balance_loss
    given = job.experts.balance_loss
    return RouterLosses(published if given is None else given, job.experts.z_loss or 0.0)


def require_experts(job: Job) -> None:
    """Raise a UserError if the job combines experts with something that forerun does not support."""
    experts, key = experts_of(job), job.experts.given
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
