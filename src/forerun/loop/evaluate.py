"""Judging a loaded model: its loss on held-out text, and tasks of lm-eval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.config import schema
from forerun.data.documents import in_memory
from forerun.data.order.concatenated import Concatenated
from forerun.data.source.rows import Bad
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import Tokenizer
from forerun.errors import UserError
from forerun.evaluate.language import Generate, Language, Messages, Wish
from forerun.evaluate.perplexity import HeldOut, held_out
from forerun.evaluate.scoring import Progress, Scorer
from forerun.evaluate.tasks import TaskResults, run_tasks
from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hub.chat import render
from forerun.loop.folder import RunFolder, job_of_run
from forerun.loop.loaded import Loaded
from forerun.loop.model_source import checkpoint_section
from forerun.models.pretrained import is_checkpoint, pretrained
from forerun.nn.sharding import BATCH_AXES
from forerun.objectives.batch import Batch

WHOLE_FILES = 1 << 62  # bytes in a piece: no file is cut
USUAL_CONTEXT = 2048  # where nothing says how long a text the model was made for; also lm-eval's own
CONTEXT_KEYS = ("n_positions", "max_position_embeddings", "n_ctx")  # of a config.json, as lm-eval looks for them


@dataclass(frozen=True)
class TextReport:
    """The loss on a text, and how much text it was."""

    result: HeldOut
    documents: int


def longest_context(source: str, revision: str | None = None) -> int:
    """Tokens that the model was made to read: a checkpoint's config.json says it, or a run's sequence."""
    run = job_of_run(RunFolder(Path(source)))
    section = run.model if run else checkpoint_section(source, revision)
    if is_checkpoint(section):
        config = pretrained(section).snapshot.json("config.json") or {}
        config = config.get("text_config") or config
        return next((int(config[key]) for key in CONTEXT_KEYS if config.get(key)), USUAL_CONTEXT)
    return run.sequence if run else USUAL_CONTEXT


def evaluate_text(
    loaded: Loaded, place: str, *, context: int, rows: int, progress: Progress | None = None
) -> TextReport:
    """The loss on all text at `place`, cut into rows of `context` tokens as training cuts it."""
    texts = _texts(place)
    ends = [loaded.tokenizer.eos]
    documents = in_memory([*loaded.tokenizer.encode(text), *ends] for text in texts)
    packed = Concatenated(documents, min(context, documents.tokens - 1))
    size = _row_count(loaded, min(rows, len(packed)))
    done = iter(range(size, len(packed) + size, size))
    if progress:
        progress(0, len(packed))

    def one_more() -> None:
        if progress:
            progress(min(next(done), len(packed)), len(packed))

    # A document's first token is given, not predicted.
    given = (loaded.tokenizer.decode([int(first)]) for first in documents.ids[documents.offsets[:-1]])
    text_bytes = sum(len(found.encode()) for found in texts) - sum(len(first.encode()) for first in given)
    result = held_out(
        loaded.model,
        loaded.params,
        loaded.mesh,
        loaded.compute,
        _batches(packed, size),
        text_bytes=max(1, text_bytes),
        done=one_more,
    )
    return TextReport(result, len(documents))


def _texts(place: str) -> list[str]:
    """Every text at `place`: text files, or rows with a column text. The first bad row is raised."""
    source = open_source(schema.Part(path=place))
    if source.form != "text":
        raise UserError(
            f"--data {place}: {source.recognised}",
            why="the loss is measured on plain text",
            fix="give text files, or rows with a column named text",
        )
    found = []
    for piece in source.pieces(WHOLE_FILES):
        for row in source.rows(piece):
            if isinstance(row, Bad):
                raise row.error()
            found.append(row.values["text"])
    return found


def evaluate_tasks(
    loaded: Loaded,
    names: Sequence[str],
    *,
    context: int,
    rows: int,
    limit: int | None = None,
    chat: bool = False,
    progress: Progress | None = None,
) -> TaskResults:
    """lm-eval's tasks by name, YAML files, or folders of them."""
    scorer = Scorer(loaded.model, loaded.params, loaded.mesh, loaded.compute, rows=rows, context=context)
    return run_tasks(names, scorer, language_of(loaded), writer_of(loaded), limit=limit, chat=chat, progress=progress)


def language_of(loaded: Loaded) -> Language:
    """The tokenizer as the tasks need it, with the special tokens that transformers would put."""
    tokenizer, template = loaded.tokenizer, loaded.chat_template

    def encode(string: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(string)]

    def rendered(messages: Messages, prompt: bool) -> str:
        assert template is not None
        return render(template, messages, special=loaded.special, prompt=prompt)

    begin = loaded.special.get("bos_token")
    ids = encode(begin) if begin else []
    return Language(
        name=f"{loaded.name} {tokenizer.name}",
        encode=encode,
        decode=tokenizer.decode,
        eos=tokenizer.eos,
        prefix=ids[0] if len(ids) == 1 else tokenizer.eos,
        prefix_text=begin if len(ids) == 1 else loaded.special.get("eos_token"),
        opening=opening_of(tokenizer),
        chat_template=template,
        render=rendered if template is not None else None,
    )


def opening_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts in front of every prompt (Llama's <s>)."""
    plain, whole = tokenizer.encode("a").tolist(), tokenizer.encode_prompt("a").tolist()
    starts = range(len(whole) - len(plain) + 1)
    return tuple(whole[: next(start for start in starts if whole[start : start + len(plain)] == plain)])


def writer_of(loaded: Loaded) -> Generate:
    """Answers by the same engine as `forerun generate`, which is made when the first task wants one."""
    engines: list[Engine] = []
    answered = 0

    def write(prompts: Sequence[Sequence[int]], wish: Wish) -> list[list[int]]:
        nonlocal answered
        if not engines:
            tokenizer = loaded.tokenizer
            engines.append(
                Engine(loaded.model, loaded.params, loaded.mesh, loaded.compute, loaded.eos, tokenizer.vocab)
            )
        settings = Settings(wish.max_tokens, Sampling(wish.temperature, wish.top_k, wish.top_p))
        stream = Stream(engines[0], prompts, settings, first_row=answered)  # repeats of a prompt differ
        answered += len(prompts)
        answers: list[list[int]] = [[] for _ in prompts]
        for step in stream:
            for row, token in enumerate(step):
                if token is None:
                    continue
                answers[row].append(token)
                if _has_stop(answers[row], wish.stop, loaded.tokenizer):
                    stream.stop(row)
        return answers

    return write


def _has_stop(ids: list[int], stop: Sequence[str], tokenizer: Tokenizer) -> bool:
    """Whether a stop text ends in the newest tokens: it has no more of them than bytes."""
    if not stop:
        return False
    reach = 8 + max(len(one.encode()) for one in stop)
    end = tokenizer.decode(ids[-reach:])
    return any(one in end for one in stop)


def _batches(rows: Concatenated, size: int) -> Iterator[Batch[NDArray[Any]]]:
    """All rows in order; the last batch is filled up with rows that weigh nothing."""
    for start in range(0, len(rows), size):
        arrays = rows.take(np.arange(start, min(start + size, len(rows))))
        missing = size - len(arrays["tokens"])
        yield Batch.of({name: np.pad(array, ((0, missing), (0, 0))) for name, array in arrays.items()})


def _row_count(loaded: Loaded, wanted: int) -> int:
    """Rounded up to what the mesh splits evenly."""
    parts = math.prod(loaded.mesh.shape.get(axis, 1) for axis in BATCH_AXES)
    return -(-wanted // parts) * parts
