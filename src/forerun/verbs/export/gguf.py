"""The GGUF file of an export, and the Modelfile with which Ollama loads it."""

from __future__ import annotations

from pathlib import Path

from forerun.config.schema import Job
from forerun.data.tokenizer import checkpoint_tokenizer
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.hub.chat.turn_format import TurnFormat, turn_format
from forerun.hub.snapshot import Snapshot
from forerun.models.families.registry import family_for
from forerun.models.families.wrapper import text_of
from forerun.reporter import Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.trained_model.chat_form import chat_form, end_ids
from forerun.verbs.export.result import GgufExport
from forerun.weights_io import serving
from forerun.weights_io.gguf.architecture import architecture_of
from forerun.weights_io.gguf.block_types import FILE_TYPES
from forerun.weights_io.gguf.gguf_file import require_gguf, write_gguf


def require_gguf_form(resolved: ResolvedJob, kind: str, merge: bool) -> None:
    """Raise a UserError if the run cannot be written as a GGUF file. Nothing is read or written."""
    if kind not in FILE_TYPES:
        raise UserError(
            "E-COMMAND-051",
            f"--gguf {kind} is not a file type that forerun writes",
            why=f"the file types are {', '.join(FILE_TYPES)}",
            fix="write --gguf f16, then convert that file with llama.cpp's llama-quantize",
        )
    if resolved.job.method.trains_adapters and not merge:
        raise UserError(
            "E-COMMAND-050",
            "a GGUF file contains the complete model, and this run has adapters",
            why="llama.cpp and Ollama load one file with all weights",
            fix="add --merge to write the complete model",
        )
    checkpoint, config = resolved.model_facts.checkpoint, resolved.config
    if config is None:
        raise UserError(
            "E-COMMAND-053",
            f"{resolved.job.model.name} has no GGUF form",
            why="llama.cpp has its own code for each architecture, and none for a custom model class",
            fix="remove --gguf; forerun export writes the weights and the class's source files",
        )
    require_gguf()
    architecture_of(checkpoint.family if checkpoint is not None else family_for(config), config)


def add_gguf(folder: Path, job: Job, kind: str, reporter: Reporter) -> GgufExport:
    """Write the complete model in `folder` as a GGUF file in the same folder."""
    snapshot = Snapshot(str(folder), folder, None)
    tokenizer = checkpoint_tokenizer(snapshot)
    form = chat_form(None, None, snapshot, tokenizer)
    generation = snapshot.json("generation_config.json") or {}
    config = snapshot.config()
    ends = end_ids(
        form,
        *(part.get("eos_token_id") for part in (generation, config, text_of(config))),
        int(tokenizer.eos),
    )
    path = folder / f"{job.name}-{kind.upper()}.gguf"
    written = write_gguf(folder, path, kind, name=job.name, ends=ends, default_context=job.sequence, reporter=reporter)
    notes = list(written.notes)
    template = None if form is None else turn_format(form.template, form.special)
    if form is None:
        notes.append("the model has no chat template, so the Modelfile gives it the prompt unchanged")
    elif template is None:
        notes.append(
            "the chat template does more than write texts around messages, so the Modelfile has no TEMPLATE for chats: "
            "use llama.cpp with --jinja, which runs the template in the GGUF file"
        )
    if template is not None:
        template = _without_bos(template, written.bos, notes)
    stops = list(dict.fromkeys([*_texts(snapshot, ends), *(() if form is None else form.end.stop)]))
    atomic_write(folder / serving.MODELFILE, serving.modelfile(path.name, template, stops, generation))
    return GgufExport(path, written.proof, tuple(notes))


def _without_bos(template: TurnFormat, added: str | None, notes: list[str]) -> TurnFormat:
    """Return the format without the begin token if the runtime adds it. `added` is the text of that token."""
    if added is None:
        return template
    starts = template.start.startswith(added) and (template.system_start or added).startswith(added)
    if not starts:
        notes.append(f"llama.cpp and Ollama add {added} to a prompt, and the chat template does not write it")
    return template.without_start(added)


def _texts(snapshot: Snapshot, ids: list[int]) -> list[str]:
    """Return the texts of the tokens that end an answer."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(snapshot.folder / "tokenizer.json"))
    return [text for one in ids if (text := inner.id_to_token(one)) is not None]
