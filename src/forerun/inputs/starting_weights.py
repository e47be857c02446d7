"""The weights that a run starts with: a checkpoint's, or random ones. All commands that read a job report them."""

from __future__ import annotations

from forerun.config.schema import Job
from forerun.data.corpus import CHAT_FORMS
from forerun.data.source.sources import open_source
from forerun.errors import UserError
from forerun.models.pretrained import is_checkpoint
from forerun.models.sizes import HUB_NAMES

_EXAMPLE = "Qwen/Qwen3-0.6B"


def starting_weights(job: Job) -> str:
    """Return a line for the user about the weights that a new run starts with."""
    name = job.model.name
    if is_checkpoint(job.model):
        return f"weights of {name}"
    pretrained = f"; the pretrained model is model={HUB_NAMES[name]}" if name in HUB_NAMES else ""
    return f"random weights (seed {job.seed}): trains from scratch{pretrained}"


def require_chosen_tokenizer(job: Job) -> None:
    """Raise if the data has conversations, the weights are random and the job sets no tokenizer.

    The default tokenizer reads single bytes, and a few thousand conversations cannot teach a language. The user
    probably wanted to fine-tune a checkpoint. `data.tokenizer: bytes` confirms the combination. The data files are
    opened, but not tokenized.
    """
    if is_checkpoint(job.model) or job.data.tokenizer is not None:
        return
    for part in job.data.parts.values():
        source = open_source(part)
        if source.form in CHAT_FORMS:
            what = "preference pairs" if source.form == "chosen/rejected" else "conversations"
            checkpoint = HUB_NAMES.get(job.model.name or "", _EXAMPLE)
            raise UserError(
                "E-RUN-037",
                f"{source.files[0].name}: {what} for a model with random weights and a byte tokenizer",
                why=f"{job.model.name or 'a model without a name'} is not a checkpoint: it would have to learn the "
                "language from this data, byte by byte",
                fix=f"fine-tune a pretrained model: model={checkpoint}; or, to train from scratch, choose a tokenizer: "
                "data.tokenizer=owner/name, a folder with a tokenizer.json, or bytes",
            )
