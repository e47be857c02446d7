"""`load_model`: a run, a Hugging Face folder or a model of the hub, to generate text with and to evaluate."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forerun.errors import UserError
from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.writing import Answer as Answer
from forerun.generate.writing import TextGeneration
from forerun.hardware.mesh import MeshShape
from forerun.models.base import capabilities_of
from forerun.reporter import SILENT, LineReporter, Reporter
from forerun.run.compile.compile_step import use_cache
from forerun.trained_model.load_model import LoadedModel
from forerun.trained_model.load_model import load_model as load_weights
from forerun.verbs.language_model.evaluate import USUAL_CONTEXT, evaluate_tasks, evaluate_text, longest_context

Message = Mapping[str, Any]


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


class LanguageModel:
    """A model on the devices of this machine, with its tokenizer and its chat template.

    Attributes:
      name: what was loaded: the run, the folder or the name on the hub.
      step: the step of the checkpoint, or None if the model is not a run.
    """

    def __init__(self, load: Callable[[], LoadedModel], source: str, revision: str | None) -> None:
        self._source, self._revision = source, revision
        self._load = load
        self._loaded = loaded = load()
        self._engine: Engine | None = None
        self.name, self.step = loaded.name, loaded.step

    def __repr__(self) -> str:
        device = self._loaded.mesh.devices.flat[0].device_kind
        step = "" if self.step is None else f", step {self.step}"
        return f"LanguageModel({self.name!r}{step}, {self._loaded.mesh.size} x {device}, {self._loaded.compute.dtype})"

    @property
    def description(self) -> str:
        """The model, its devices and its dtype in one line."""
        device = self._loaded.mesh.devices.flat[0].device_kind
        return f"{self.name}: {self._loaded.mesh.size} x {device}, {self._loaded.compute.dtype}"

    @property
    def dtype(self) -> str:
        """The dtype of the weights and of the computation."""
        return str(self._loaded.compute.dtype)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, with `encode(text)` and `decode(ids)`."""
        return self._loaded.tokenizer

    @property
    def engine(self) -> Engine:
        """The compiled generation programs. They are created on first use and then own the weights."""
        if self._engine is None:
            loaded = self._loaded
            if not capabilities_of(loaded.model).has_cache:
                name = type(loaded.model).__name__
                LineReporter(sys.stderr).warn(
                    f"{name} has no `cache` and `extend`: every token is computed from the whole text, which is slow"
                )
            self._engine = Engine(
                loaded.model,
                loaded.params,
                loaded.mesh,
                loaded.compute,
                loaded.eos,
                loaded.tokenizer.vocab,
                consume=True,
            )
        return self._engine

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> str:
        """Return the text that the model generates after a prompt.

        Args:
          prompt: the text to continue.
          max_tokens: the largest number of tokens to generate.
          temperature: 0 always takes the most likely token.
          top_k: sample from the k most likely tokens only.
          top_p: sample from the most likely tokens whose probabilities add up to this.
          stop: texts that end the answer; they are not part of it.
          seed: the same seed gives the same text.
        """
        settings = _settings(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        return self._complete(self.write([self.plain_ids(prompt)], settings, stop)).text

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """Yield pieces of the generated text as they become certain. The options are those of `generate`."""
        stop = options.pop("stop", ())
        settings = _settings(**options)
        for _, piece in self.write([self.plain_ids(prompt)], settings, stop):
            yield piece

    def chat(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the answer to a conversation.

        Args:
          messages: dictionaries with `role` and `content`, such as `{"role": "user", "content": "Hello"}`.
          **options: those of `generate`.

        Raises:
          UserError: The model has no chat template.
        """
        stop = options.pop("stop", ())
        settings = _settings(**options)
        return self._complete(self.write(self.chat_ids([messages]), settings, [*stop, *self.turn_stop])).text

    def evaluate(
        self, data: str, *, context: int | None = None, rows: int = 8, reporter: Reporter = SILENT
    ) -> Evaluation:
        """Measure the loss on held-out text.

        Args:
          data: a file or a folder with text.
          context: the number of tokens in a row; default: the model's longest, but at most 2048.
          rows: the number of rows that are computed together.
          reporter: shows the number of finished rows.
        """
        context = context or min(self.longest_context, USUAL_CONTEXT)
        report = evaluate_text(self._with_weights(), data, context=context, rows=rows, reporter=reporter)
        found = report.result
        return Evaluation(
            loss=found.loss,
            perplexity=found.perplexity,
            bits_per_byte=found.bits_per_byte,
            tokens=found.tokens,
            text_bytes=found.text_bytes,
            documents=report.documents,
            context=context,
        )

    def evaluate_tasks(
        self,
        tasks: Sequence[str],
        *,
        context: int | None = None,
        rows: int = 8,
        limit: int | None = None,
        chat: bool = False,
        reporter: Reporter = SILENT,
    ) -> Any:
        """Run tasks of lm-eval and return their results. The `eval` extra must be installed.

        Args:
          tasks: names of tasks, YAML files, or folders of them.
          context: the longest input in tokens; default: the model's.
          rows: the number of rows that are computed together.
          limit: use only the first examples of each task.
          chat: use the chat template of the model.
          reporter: shows the number of finished requests.

        Returns:
          An object with `values`, the results by task, and `table`, the table of lm-eval as text.
        """
        return evaluate_tasks(
            self._with_weights(),
            tasks,
            context=context or self.longest_context,
            rows=rows,
            limit=limit,
            chat=chat,
            reporter=reporter,
        )

    @property
    def longest_context(self) -> int:
        """The largest number of tokens that the model was made for."""
        return longest_context(self._source, self._revision)

    def plain_ids(self, text: str) -> list[int]:
        """Return the tokens of a plain prompt, with the token that the tokenizer puts first (such as Llama's <s>)."""
        return [int(token) for token in self._loaded.tokenizer.encode_prompt(text)]

    def chat_ids(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the tokens of conversations, as the model was trained on them, up to the answer."""
        from forerun.data.chat_template import chat_prompts

        loaded = self._loaded
        return chat_prompts(
            conversations,
            self.chat_template,
            loaded.special,
            loaded.tokenizer,
            special_tokens=loaded.special_tokens,
            origin=loaded.template_origin,
        )

    @property
    def turn_stop(self) -> tuple[str, ...]:
        """The texts that end a turn where no single token does."""
        return self._loaded.turn_stop

    @property
    def chat_template(self) -> str:
        """The chat template. Raises UserError if the model has none."""
        if self._loaded.chat_template is None:
            raise UserError(
                "E-COMMAND-021",
                f"{self.name} has no chat template",
                why="neither its files nor the job of its run (data.chat_template) has one: it was not trained to chat",
                fix=f'use plain prompts: forerun generate {self.name} "Once upon a time"',
            )
        return self._loaded.chat_template

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Settings,
        stop: Sequence[str] = (),
        *,
        row_stops: Sequence[Sequence[str]] | None = None,
        first_row: int = 0,
    ) -> TextGeneration:
        """Return the answers to several prompts as an iterator over (row, piece of text). See `TextGeneration`."""
        decode = self._loaded.tokenizer.decode
        return TextGeneration(self.engine, prompts, settings, decode, stop, row_stops=row_stops, first_row=first_row)

    @staticmethod
    def _complete(writing: TextGeneration) -> Answer:
        for _ in writing:
            pass
        return writing.answers[0]

    def _with_weights(self) -> LoadedModel:
        """Return the model with its weights. They are read again if generation has taken them over."""
        return self._loaded if self._engine is None else self._load()


def _settings(
    *,
    max_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Settings:
    return Settings(max_tokens, Sampling(temperature, top_k, top_p), seed)


def load_model(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str = "auto",
    devices: int | None = None,
    mesh: tuple[int, int, int] | None = None,
    dtype: str | None = None,
    code: str | os.PathLike[str] | None = None,
) -> LanguageModel:
    """Load a model to generate text with or to evaluate.

    Args:
      source: the folder of a run, a Hugging Face folder, or a name on the hub such as `"Qwen/Qwen3-0.6B"`.
      revision: the branch, tag or commit of a name on the hub.
      device: auto, tpu, gpu or cpu.
      devices: how many devices to use; default: all.
      mesh: the sizes of the axes data, fsdp and tp; default: all devices along fsdp.
      dtype: bfloat16 or float32; default: bfloat16, but float32 on a CPU.
      code: for a run with a custom model class, the folder of its module, if it was moved.

    Raises:
      UserError: The source is neither a run nor a checkpoint, or its files are damaged.
    """
    use_cache()
    load = partial(
        load_weights,
        os.fspath(source),
        revision=revision,
        device=device,
        devices=devices,
        mesh=None if mesh is None else MeshShape(*mesh),
        dtype=dtype,
        code=None if code is None else os.fspath(code),
        reporter=LineReporter(sys.stderr),
    )
    return LanguageModel(load, os.fspath(source), revision)
