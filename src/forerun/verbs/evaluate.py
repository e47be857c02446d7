"""Evaluation of a loaded model: its loss on held-out text, and tasks of lm-eval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.config import schema
from forerun.data.documents import in_memory
from forerun.data.order.concatenated import Concatenated
from forerun.data.source.rows import BadRow
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import Tokenizer
from forerun.errors import UserError
from forerun.evaluate.perplexity import held_out
from forerun.evaluate.scoring import Generate, GenerationRequest, Language, Messages, Scorer
from forerun.evaluate.tasks import TaskResults, run_tasks
from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hub.chat.template import render
from forerun.nn.sharding import BATCH_AXES
from forerun.objectives.batch import Batch
from forerun.reporter import SILENT, Reporter
from forerun.trained_model.load_model import LoadedModel
from forerun.trained_model.model_source import model_source
from forerun.units import Count

WHOLE_FILES = 1 << 62  # bytes in a piece: no file is cut
USUAL_CONTEXT = 2048  # where nothing says how long a text the model was made for; also lm-eval's own
CONTEXT_KEYS = ("n_positions", "max_position_embeddings", "n_ctx")  # of a config.json, as lm-eval looks for them


@dataclass(frozen=True)
class Evaluation:
    """The quality of a model on held-out text.

    Attributes:
      loss: the mean loss, in nats per token.
      perplexity: the exponential of the loss.
      bits_per_byte: the loss in bits per byte of text, which does not depend on the tokenizer.
      tokens: the number of tokens that were predicted.
      text_bytes: the number of bytes of these tokens.
      documents: the number of documents.
      context: the number of tokens in a row.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    text_bytes: int
    documents: int
    context: int

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} nats per token, perplexity {self.perplexity:.4g}, {self.bits_per_byte:.4f} bits per "
            f"byte ({Count(self.tokens)} tokens, contexts of {self.context})"
        )


def longest_context(source: str, revision: str | None = None) -> int:
    """Return the longest context: that of the checkpoint's config.json, or the sequence of a run."""
    found = model_source(source, revision)
    if found.snapshot is not None:
        config = found.snapshot.json("config.json") or {}
        config = config.get("text_config") or config
        return next((int(config[key]) for key in CONTEXT_KEYS if config.get(key)), USUAL_CONTEXT)
    return found.resolved.job.sequence if found.resolved else USUAL_CONTEXT


def evaluate_text(
    loaded: LoadedModel, place: str, *, context: int, rows: int, reporter: Reporter = SILENT
) -> Evaluation:
    """Return the loss on all text at `place`, cut into rows of `context` tokens as in training."""
    texts = _texts(place)
    ends = [loaded.tokenizer.eos]
    documents = in_memory([*loaded.tokenizer.encode(text), *ends] for text in texts)
    packed = Concatenated(documents, min(context, documents.tokens - 1))
    size = _row_count(loaded, min(rows, len(packed)))
    # The first token of a document is not predicted.
    given = (loaded.tokenizer.decode([int(first)]) for first in documents.ids[documents.offsets[:-1]])
    text_bytes = sum(len(found.encode()) for found in texts) - sum(len(first.encode()) for first in given)
    with reporter.progress("rows", len(packed)) as progress:

        def batches() -> Iterator[Batch[NDArray[Any]]]:
            for number, batch in enumerate(_batches(packed, size), start=1):
                yield batch
                progress.update(min(number * size, len(packed)))  # the loss of the batch was added

        result = held_out(
            loaded.model, loaded.params, loaded.mesh, loaded.compute, batches(), text_bytes=max(1, text_bytes)
        )
    return Evaluation(
        loss=result.loss,
        perplexity=result.perplexity,
        bits_per_byte=result.bits_per_byte,
        tokens=result.tokens,
        text_bytes=result.text_bytes,
        documents=len(documents),
        context=context,
    )


def _texts(place: str) -> list[str]:
    """Return every text at `place`: text files, or rows with the column text. Raise at the first bad row."""
    source = open_source(schema.Part(path=place))
    if source.form != "text":
        raise UserError(
            "E-RUN-018",
            f"--data {place}: {source.recognised}",
            why="the loss is measured on plain text",
            fix="give text files, or rows with a column named text",
        )
    found = []
    for piece in source.pieces(WHOLE_FILES):
        for row in source.rows(piece):
            if isinstance(row, BadRow):
                raise row.error()
            found.append(row.values["text"])
    return found


def evaluate_tasks(
    loaded: LoadedModel,
    names: Sequence[str],
    *,
    context: int,
    rows: int,
    limit: int | None = None,
    chat: bool = False,
    reporter: Reporter = SILENT,
) -> TaskResults:
    """Run tasks of lm-eval, which are names, YAML files, or folders of them."""
    scorer = Scorer(loaded.model, loaded.params, loaded.mesh, loaded.compute, rows=rows, context=context)
    return run_tasks(names, scorer, language_of(loaded), writer_of(loaded), limit=limit, chat=chat, reporter=reporter)


def language_of(loaded: LoadedModel) -> Language:
    """Return the tokenizer in the form that tasks need, with the special tokens that transformers would add."""
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
    """Return the tokens that the tokenizer puts before every prompt (Llama's <s>)."""
    plain, whole = tokenizer.encode("a").tolist(), tokenizer.encode_prompt("a").tolist()
    starts = range(len(whole) - len(plain) + 1)
    return tuple(whole[: next(start for start in starts if whole[start : start + len(plain)] == plain)])


def writer_of(loaded: LoadedModel) -> Generate:
    """Return a function that generates answers with the engine of `forerun generate`, created on first use."""
    engines: list[Engine] = []
    answered = 0

    def write(prompts: Sequence[Sequence[int]], wish: GenerationRequest) -> list[list[int]]:
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
    """Return whether a stop text ends in the newest tokens. A text has at most as many tokens as bytes."""
    if not stop:
        return False
    reach = 8 + max(len(one.encode()) for one in stop)
    end = tokenizer.decode(ids[-reach:])
    return any(one in end for one in stop)


def _batches(rows: Concatenated, size: int) -> Iterator[Batch[NDArray[Any]]]:
    """Yield all rows in order. The last batch is filled with rows of weight 0."""
    for start in range(0, len(rows), size):
        arrays = rows.take(np.arange(start, min(start + size, len(rows))))
        missing = size - len(arrays["tokens"])
        yield Batch.of({name: np.pad(array, ((0, missing), (0, 0))) for name, array in arrays.items()})


def _row_count(loaded: LoadedModel, wanted: int) -> int:
    """Return the number of rows, rounded up so that the mesh divides it evenly."""
    parts = math.prod(loaded.mesh.shape.get(axis, 1) for axis in BATCH_AXES)
    return -(-wanted // parts) * parts
