"""Limits on the dimensions of a model, for the keys of a job and for the config.json of a checkpoint.

No published model is near an upper limit. A number above it is a mistake or an attack, and could take hours to process:
a model of 10^9 layers would be a list of 10^9 layers.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_LAYERS = 1024  # Llama 3.1 405B has 126
MAX_WIDTH = 1 << 18  # width of the residual stream; Llama 3.1 405B has 16,384
MAX_HEADS = 4096
MAX_HEAD_WIDTH = 1 << 14
MAX_MLP = 1 << 20
MAX_EXPERTS = 1 << 14  # Qwen3.5 397B has 512
MAX_VOCAB = 1 << 24  # Gemma has 262,144
MAX_POSITIONS = 1 << 31  # Llama 4 has 10,485,760
MAX_THETA = 1e15
MAX_FACTOR = 1e6

Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
Width = Annotated[int, Field(gt=0, le=MAX_WIDTH)]
Heads = Annotated[int, Field(gt=0, le=MAX_HEADS)]
HeadWidth = Annotated[int, Field(gt=0, le=MAX_HEAD_WIDTH)]
MlpWidth = Annotated[int, Field(gt=0, le=MAX_MLP)]
Vocabulary = Annotated[int, Field(gt=0, le=MAX_VOCAB)]
Positions = Annotated[int, Field(gt=0, le=MAX_POSITIONS)]
Theta = Annotated[float, Field(gt=1, le=MAX_THETA)]
Factor = Annotated[float, Field(gt=0, le=MAX_FACTOR)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
