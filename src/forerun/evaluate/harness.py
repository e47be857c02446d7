"""forerun's model behind lm-eval's own interface. Imports lm-eval: `tasks.py` says what is missing without it.

Tokens are made as lm-eval's HFLM makes them, so that its scores and ours are of the same thing: spaces at the end of
a context belong to the continuation, the continuation's tokens are those of the whole text behind the context's, an
empty context is the beginning (or end) token, long contexts lose their oldest tokens.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from forerun.errors import UserError
from forerun.evaluate.language import Generate, Language, Messages, Wish
from forerun.evaluate.scoring import Progress, Scorer

MAX_TOKENS = 256  # as HFLM, for tasks that do not say
WITHOUT_EFFECT = {"num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1.0}  # values that change nothing


class HarnessModel(TemplateLM):
    """Give it to `lm_eval.simple_evaluate(model=...)`."""

    def __init__(
        self, scorer: Scorer, language: Language, generate: Generate, progress: Progress | None = None
    ) -> None:
        super().__init__()
        self._scorer, self._language, self._generate, self._progress = scorer, language, generate, progress

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
        """Opened as the tokenizer opens every text, unless the text itself begins so."""
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
        scores = self._scorer.token_logprobs([(before, after) for _, before, after in requests], self._progress)
        answers = [(score.logprob_sum, score.is_greedy) for score in scores]
        for (text, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Of whole texts: each token once, in windows of the longest context."""
        windows: list[tuple[int, list[int], list[int]]] = []
        for number, request in enumerate(requests):
            rolled = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(number, *make_disjoint_window(window)) for window in rolled]
        scores = self._scorer.token_logprobs([(before, after) for _, before, after in windows], self._progress)
        sums = [0.0] * len(requests)
        for (number, _, _), score in zip(windows, scores, strict=True):
            sums[number] += score.logprob_sum
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Requests of the same wish are written together, the longest prompts first."""
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        groups: dict[Wish, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(self._wish(request.args[1]), []).append(number)
        texts, done = [""] * len(requests), 0
        if self._progress:
            self._progress(done, len(requests))
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
                if self._progress:
                    self._progress(done, len(requests))
        return texts

    def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
        if self._language.render is None:
            raise UserError(
                "--chat: this model has no chat template",
                why="neither its tokenizer_config.json nor a chat_template.jinja gives one",
                fix="leave --chat out",
            )
        text = self._language.render(chat_history, add_generation_prompt)
        if add_generation_prompt or not chat_history:
            return text
        last = chat_history[-1]["content"].strip()  # the answer has begun and is to go on
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._language.chat_template if chat_template else None

    def _wish(self, given: dict[str, Any]) -> Wish:
        asked = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        stop = handle_stop_sequences(asked.pop("until", None), eos=None)
        temperature = float(asked.pop("temperature", 0.0))
        wish = Wish(
            max_tokens=asked.pop("max_gen_toks"),
            stop=tuple(text for text in stop if text),
            temperature=temperature if asked.pop("do_sample", False) else 0.0,
            top_k=asked.pop("top_k", None) or None,
            top_p=asked.pop("top_p", None),
        )
        for key, value in asked.items():
            if WITHOUT_EFFECT.get(key) != value:
                raise UserError(
                    f"a task wants {key}={value} for its answers",
                    why="forerun chooses tokens by temperature, top_k and top_p only",
                    fix="take it out of the task's generation_kwargs, or choose another task",
                )
        return wish

    def _room(self, wish: Wish) -> int:
        """Tokens of a prompt that leave space for the answer."""
        room = self.max_length - wish.max_tokens
        if room < 1:
            raise UserError(
                f"a task wants {wish.max_tokens} new tokens, the context has {self.max_length}",
                why="nothing of the prompt would be left",
                fix=f"--context {2 * wish.max_tokens}, or a smaller max_gen_toks in the task",
            )
        return room
