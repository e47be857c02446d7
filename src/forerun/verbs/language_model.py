"""`load_model`: a run, a Hugging Face folder or a model of the hub, to generate text with and to evaluate."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forerun.errors import UserError
from forerun.reporter import SILENT, LineReporter, Reporter
from forerun.verbs.option_types import Count, Folder, Texts, Value, comma_list, count, mesh_sizes

if TYPE_CHECKING:
    from forerun.generate.engine import Engine, Settings
    from forerun.generate.stream import Answer, TextGeneration
    from forerun.trained_model.load_model import LoadedModel
    from forerun.verbs.evaluate import Evaluation

Message = Mapping[str, Any]


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
        from forerun.generate.engine import Engine
        from forerun.models.base import capabilities_of

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
        max_tokens: Count = 128,
        temperature: Annotated[float, Value("T")] = 0.8,
        top_k: Annotated[int, Value("K", count)] | None = None,
        top_p: Annotated[float, Value("P")] | None = None,
        stop: Texts = (),
        seed: Annotated[int, Value("N")] = 0,
    ) -> str:
        """Return the text that the model generates after a prompt.

        Args:
          prompt: text to continue
          max_tokens: longest answer in tokens
          temperature: sampling temperature; 0 takes the most likely token
          top_k: sample from the K most likely tokens
          top_p: sample from the most likely tokens with total probability P
          stop: end the answer before this text; can be repeated
          seed: random seed; the same seed gives the same answer
        """
        settings = generation_settings(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        return self._complete(self.write([self.plain_ids(prompt)], settings, stop)).text

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """Yield pieces of the generated text as they become certain. The options are those of `generate`."""
        stop = options.pop("stop", ())
        settings = generation_settings(**options)
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
        settings = generation_settings(**options)
        return self._complete(self.write(self.chat_ids([messages]), settings, [*stop, *self.turn_stop])).text

    def evaluate(
        self,
        data: str,
        *,
        context: int | None = None,
        rows: int = 8,
        reporter: Reporter = SILENT,
    ) -> Evaluation:
        """Measure the loss on held-out text.

        Args:
          data: file or folder with held-out text
          context: number of tokens in a row; default: the model's longest, but at most 2048
          rows: number of rows that are computed together
          reporter: shows the number of finished rows
        """
        from forerun.verbs.evaluate import USUAL_CONTEXT, evaluate_text

        context = context or min(self.longest_context, USUAL_CONTEXT)
        return evaluate_text(self._with_weights(), data, context=context, rows=rows, reporter=reporter)

    def evaluate_tasks(
        self,
        tasks: Annotated[Sequence[str], Value("TASKS", comma_list)],
        *,
        context: Count | None = None,
        rows: Annotated[int, Value("N", count, option="batch")] = 8,
        limit: Count | None = None,
        chat: bool = False,
        reporter: Reporter = SILENT,
    ) -> Any:
        """Run tasks of lm-eval and return their results. The `eval` extra must be installed.

        Args:
          tasks: tasks of lm-eval: names, YAML files or folders, for example a,b
          context: longest input in tokens (default: that of the model)
          rows: rows that are computed together
          limit: with `tasks`: only the first N examples of each task
          chat: with `tasks`: use the chat template of the model
          reporter: shows the number of finished requests

        Returns:
          An object with `values`, the results by task, and `table`, the table of lm-eval as text.
        """
        from forerun.verbs.evaluate import evaluate_tasks

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
        from forerun.verbs.evaluate import longest_context

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
        from forerun.generate.stream import TextGeneration

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


def generation_settings(
    *,
    max_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Settings:
    """Return the settings of a generation. See `LanguageModel.generate`.

    Raises:
      UserError: A setting is not possible.
    """
    from forerun.generate.engine import Settings
    from forerun.generate.sampling import Sampling

    return Settings(max_tokens, Sampling(temperature, top_k, top_p), seed)


def load_model(
    source: str | os.PathLike[str],
    *,
    revision: Annotated[str, Value("REV")] | None = None,
    device: Literal["auto", "tpu", "gpu", "cpu"] = "auto",
    devices: Count | None = None,
    mesh: Annotated[tuple[int, int, int], Value("DxFxT", mesh_sizes)] | None = None,
    dtype: Literal["bfloat16", "float32"] | None = None,
    code: Folder | None = None,
) -> LanguageModel:
    """Load a model to generate text with or to evaluate.

    Args:
      source: folder of a run, Hugging Face folder, or name on the hub such as Qwen/Qwen3-0.6B
      revision: branch, tag or commit of a hub name
      device: device to use
      devices: number of devices (default: all)
      mesh: sizes of data, fsdp and tp, for example 1x1x4 (default: all devices along fsdp)
      dtype: dtype of weights and arithmetic (default: bfloat16; on a CPU float32)
      code: for a run or an export of a custom model class: folder of its module

    Raises:
      UserError: The source is neither a run nor a checkpoint, or its files are damaged.
    """
    from forerun.hardware.mesh import MeshShape
    from forerun.run.compile_step import use_cache
    from forerun.trained_model.load_model import load_model as load_weights

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
