"""The options of `generate`, `chat` and `eval`, which several functions of the API take."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.generate.engine import Settings
    from forerun.verbs.language_model.language_model import LanguageModel

LOAD_MODEL = "forerun.verbs.language_model.language_model:load_model"
GENERATE = "forerun.verbs.language_model.language_model:LanguageModel.generate"


def take_options(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Remove the parameters of a function from `options`, and return them."""
    return {name: options.pop(name) for name in inspect.signature(function).parameters if name in options}


def load_model_and_settings(source: str, options: dict[str, Any]) -> tuple[LanguageModel, Settings]:
    """Load a model and print its description, after a check of all options."""
    from forerun.verbs.language_model.language_model import generation_settings, load_model

    load_options = take_options(load_model, options)
    settings = generation_settings(**options)
    model = load_model(source, **load_options)
    print(model.description, file=sys.stderr, flush=True)
    return model, settings
