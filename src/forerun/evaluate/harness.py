"""The adapter from forerun's models to the interface of lm-eval.

Imports lm-eval; `tasks.py` reports an error if it is not installed. Texts are tokenized exactly as in HFLM of lm-eval,
so that the scores are comparable:

- Spaces at the end of a context belong to the continuation.
- The tokens of the continuation are those of the complete text after the tokens of the context.
- An empty context is the beginning (or end) token.
- Long contexts lose their oldest tokens.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from forerun.errors import UserError
from forerun.evaluate.scoring import Generate, GenerationRequest, Language, Messages, Scorer
from forerun.reporter import SILENT, Reporter

MAX_TOKENS = 256  # the default of HFLM, for tasks that do not set it
WITHOUT_EFFECT = {"num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1.0}  # values without effect


class HarnessModel(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=...)`."""

    def __init__(self, scorer: Scorer, language: Language, generate: Generate, reporter: Reporter = SILENT) -> None:
        super().__init__()
        self._scorer, self._language, self._generate, self._reporter = scorer, language, generate, reporter

    @property
    def eot_token_id(self) -> int:
        return self._language.eos

    @property
    def prefix_token_id(self) -> int:
        return self._language.prefix

    @property
    def max_length(self) -> int:
        return self._scorer.context

    @property
    def max_gen_toks(self) -> int:
        return MAX_TOKENS

    @property
    def batch_size(self) -> int:
        return self._scorer.rows

    @property
    def tokenizer_name(self) -> str:
        return self._language.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, with the tokenizer's opening ids unless the text already begins with them."""
        if add_special_tokens is None:
            begins = self._language.prefix_text
            add_special_tokens = not (begins and string.startswith(begins))
        opening = self._language.opening if add_special_tokens else ()
        return [*opening, *self._language.encode(string)]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self._scorer.token_logprobs([(before, after) for _, before, after in requests], self._reporter)
        answers = [(score.logprob_sum, score.is_greedy) for score in scores]
        for (text, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of each text. Every token is scored once, in windows of the longest context."""
        windows: list[tuple[int, list[int], list[int]]] = []
        for number, request in enumerate(requests):
            rolled = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(number, *make_disjoint_window(window)) for window in rolled]
        scores = self._scorer.token_logprobs([(before, after) for _, before, after in windows], self._reporter)
        sums = [0.0] * len(requests)
        for (number, _, _), score in zip(windows, scores, strict=True):
            sums[number] += score.logprob_sum
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the generated texts. Requests with the same settings form batches, the longest prompts first."""
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        groups: dict[GenerationRequest, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(self._wish(request.args[1]), []).append(number)
        texts, done = [""] * len(requests), 0
        with self._reporter.progress("requests", len(requests)) as progress:
            for wish, numbers in groups.items():
                numbers.sort(key=lambda number: -len(prompts[number]))
                room = self._room(wish)
                for start in range(0, len(numbers), self.batch_size):
                    part = numbers[start : start + self.batch_size]
                    written = self._generate([prompts[number][-room:] for number in part], wish)
                    for number, ids in zip(part, written, strict=True):
                        text = postprocess_generated_text(self._language.decode(ids), list(wish.stop), None)
                        texts[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    done += len(part)
                    progress.update(done)
        return texts

    def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
        if self._language.render is None:
            raise UserError(
                "E-EVAL-001",
                "--chat: this model has no chat template",
                why="neither its tokenizer_config.json nor a chat_template.jinja has one",
                fix="remove --chat",
            )
        text = self._language.render(chat_history, add_generation_prompt)
        if add_generation_prompt or not chat_history:
            return text
        last = chat_history[-1]["content"].strip()  # the model must continue this answer, so remove the end of the turn
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._language.chat_template if chat_template else None

    def _wish(self, given: dict[str, Any]) -> GenerationRequest:
        """Return the generation settings of a task. Raise a UserError for one that forerun does not support."""
        asked = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        stop = handle_stop_sequences(asked.pop("until", None), eos=None)
        temperature = float(asked.pop("temperature", 0.0))
        wish = GenerationRequest(
            max_tokens=asked.pop("max_gen_toks"),
            stop=tuple(text for text in stop if text),
            temperature=temperature if asked.pop("do_sample", False) else 0.0,
            top_k=asked.pop("top_k", None) or None,
            top_p=asked.pop("top_p", None),
        )
        for key, value in asked.items():
            if WITHOUT_EFFECT.get(key) != value:
                raise UserError(
                    "E-EVAL-002",
                    f"a task wants {key}={value} for its answers",
                    why="forerun chooses tokens by temperature, top_k and top_p only",
                    fix="remove it from the task's generation_kwargs, or choose another task",
                )
        return wish

    def _room(self, wish: GenerationRequest) -> int:
        """Return the number of prompt tokens that leave space for the answer."""
        room = self.max_length - wish.max_tokens
        if room < 1:
            raise UserError(
                "E-EVAL-003",
                f"a task wants {wish.max_tokens} new tokens, the context has {self.max_length}",
                why="the context would have no space for the prompt",
                fix=f"set --context {2 * wish.max_tokens}, or a smaller max_gen_toks in the task",
            )
        return room
