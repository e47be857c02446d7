"""Sample text of the trained model during a run and at its end, from the engine of `forerun generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from forerun.config.schema import Sample
from forerun.data.tokenizer import Tokenizer
from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import NotFinite, Stream
from forerun.nn.spec import merge
from forerun.program.build import Program
from forerun.program.state import State
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.hooks import Hook, RunSession
from forerun.run.throughput import Throughput
from forerun.safe_text import printable
from forerun.track.metrics import MetricsLog

NOT_FINITE = "[the logits of the next token are not finite]"
SHOWN = 200  # characters of a sample that the reporter shows


class Sampler:
    """Completes prompts with the weights of a run. Its programs are compiled once.

    On several hosts, all of them call its methods together: the weights are distributed over their devices.

    Args:
      program: the program of the run.
      tokenizer: the tokenizer of the run.
      sample: the settings.
      sequence: no token depends on more than this number of tokens, as in training.
      seed: the same seed gives the same random numbers at each step.
    """

    def __init__(self, program: Program, tokenizer: Tokenizer, sample: Sample, sequence: int, seed: int) -> None:
        self._program, self._tokenizer, self._sample = program, tokenizer, sample
        self._sequence, self._seed = sequence, seed
        self._engine: Engine | None = None

    def compile(self, state: State) -> None:
        """Compile the programs for all prompts of the job, before the first step: later, a compilation is an error.

        The prompts are completed once. No token ends a text here, so that each program for a longer text is used.
        """
        for prompt in self._sample.texts:
            self._complete(prompt, weights_of(self._program, state), frozenset())

    def samples(self, state: State) -> list[dict[str, str]]:
        """Return each prompt of the job and its continuation."""
        params, found = weights_of(self._program, state), []
        for prompt in self._sample.texts:
            head, text = self.complete(prompt, params)
            found.append({"prompt": prompt, "text": text.removeprefix(head)})
        return found

    def complete(self, prompt: str, params: Any) -> tuple[str, str]:
        """Return the prompt as the model reads it, and the complete text: the prompt and its continuation."""
        known, ids, ending = self._complete(prompt, params, frozenset({self._tokenizer.eos}))
        decode = self._tokenizer.decode
        return decode(np.asarray(known, np.int32)), decode(np.asarray(ids, np.int32)) + ending

    def _complete(self, prompt: str, params: Any, eos: frozenset[int]) -> tuple[list[int], list[int], str]:
        tokenizer, sample, sequence = self._tokenizer, self._sample, self._sequence
        prompt_ids = tokenizer.encode(prompt)[-sequence:].tolist() or [tokenizer.eos]
        engine, ids = self._engine_with(params, eos), list(prompt_ids)
        wanted, windows = len(ids) + sample.tokens, 0
        try:
            while len(ids) < wanted:
                # A full window is followed by one that starts with its second half: one prefill serves many tokens.
                known = ids[-max(1, sequence // 2) :] if windows else ids
                count = min(wanted - len(ids), sequence - len(known) + 1)
                settings = Settings(count, Sampling(sample.temperature), self._seed)
                stream = Stream(engine, [known], settings, first_row=windows)  # each window has its own random numbers
                new: list[int] = []
                try:
                    for (token,) in stream:
                        if token is not None:
                            new.append(token)
                except NotFinite:
                    return prompt_ids, ids, f" {NOT_FINITE}"
                ids += new
                if stream.finish[0] == "eos":
                    ids.append(tokenizer.eos)
                    break
                windows += 1
        finally:
            engine.params = None  # the next step reuses the buffers of the weights
        return prompt_ids, ids, ""

    def _engine_with(self, params: Any, eos: frozenset[int]) -> Engine:
        program, tokenizer = self._program, self._tokenizer
        if self._engine is None:
            self._engine = Engine(program.model, params, program.mesh, program.compute, eos, tokenizer.vocab)
        self._engine.params, self._engine.eos = params, eos
        return self._engine


class SampleHook(Hook):
    """Completes the prompts of the job every `sample.every` steps and at the last step.

    It acts before the checkpoint of its step, which therefore contains the line with the samples. A run that resumes
    from a checkpoint has the samples of all steps up to it, and it generates those of later steps again.

    Args:
      ends_early: returns whether the run ends at this step although it is not the last one.
      metrics_log: the log on the first host, None on the others.
    """

    def __init__(
        self,
        session: RunSession,
        sampler: Sampler | None,
        throughput: Throughput,
        ends_early: Callable[[], bool],
        metrics_log: MetricsLog | None,
    ) -> None:
        self._session, self._every, self._ends_early = session, session.resolved.job.sample.every, ends_early
        self._sampler, self._throughput, self._metrics_log = sampler, throughput, metrics_log

    def is_due(self, step: int) -> bool:
        if self._sampler is None:
            return False
        return step % self._every == 0 or step == self._throughput.last or self._ends_early()

    def on_step(self, step: int, state: State) -> None:
        assert self._sampler is not None
        self._session.worker.pulse.phase("samples")
        with self._session.times.spent("samples"):
            samples = self._sampler.samples(state)
        if self._metrics_log is not None:
            self._metrics_log.write(step, samples=samples)
        for sample in samples:
            self._session.reporter.info(f"sample at step {step}: {_shown(sample['prompt'])} | {_shown(sample['text'])}")
        self._throughput.exclude()


def sampler_of(resolved: ResolvedJob, program: Program, tokenizer: Tokenizer) -> Sampler | None:
    """Return the sampler of a job, or None if it asks for no samples during the run."""
    job = resolved.job
    return Sampler(program, tokenizer, job.sample, job.sequence, job.seed) if job.sample.every else None


def weights_of(program: Program, state: State) -> Any:
    """Return the weights of the trained model: their moving average if the job has one, as in validation."""
    weights = state.params if state.average is None else merge(state.average, state.params)
    return program.method.objective.own(weights)


def sample_text(program: Program, params: Any, tokenizer: Tokenizer, sample: Sample, sequence: int, seed: int) -> str:
    """Return the prompt and its continuation. As in training, no token depends on more than `sequence` tokens."""
    return Sampler(program, tokenizer, sample, sequence, seed).complete(sample.prompt, params)[1]


def _shown(text: str) -> str:
    """Return the start of a text on one line, without characters that control a terminal."""
    line = printable(text).replace("\n", "\\n")
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
