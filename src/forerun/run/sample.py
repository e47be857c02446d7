"""Sample text of the trained model, from the engine of `forerun generate`."""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.config.schema import Sample
from forerun.data.tokenizer import Tokenizer
from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import NotFinite, Stream
from forerun.program.build import Program

NOT_FINITE = "[the logits of the next token are not finite]"


def sample_text(program: Program, params: Any, tokenizer: Tokenizer, sample: Sample, sequence: int, seed: int) -> str:
    """Return the prompt and its continuation. As in training, no token depends on more than `sequence` tokens."""
    ids = tokenizer.encode(sample.prompt)[-sequence:].tolist() or [tokenizer.eos]
    engine = Engine(program.model, params, program.mesh, program.compute, frozenset({tokenizer.eos}), tokenizer.vocab)
    wanted, windows = len(ids) + sample.tokens, 0
    while len(ids) < wanted:
        # A full window is followed by one that starts with its second half. One prefill then serves many tokens.
        known = ids[-max(1, sequence // 2) :] if windows else ids
        count = min(wanted - len(ids), sequence - len(known) + 1)
        settings = Settings(count, Sampling(sample.temperature), seed)
        stream = Stream(engine, [known], settings, first_row=windows)  # each window gets its own random numbers
        try:
            ids += [token for (token,) in stream if token is not None]
        except NotFinite:
            return f"{tokenizer.decode(np.asarray(ids, np.int32))} {NOT_FINITE}"
        if stream.finish[0] == "eos":
            ids.append(tokenizer.eos)
            break
        windows += 1
    return tokenizer.decode(np.asarray(ids, np.int32))
