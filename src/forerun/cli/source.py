"""The model that `generate` and `chat` speak with: loaded, laid out, and told of in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forerun.errors import UserError

if TYPE_CHECKING:
    from forerun.generate.engine import Engine, Settings
    from forerun.hardware.mesh import MeshShape
    from forerun.loop.loaded import Loaded


class Source:
    """A loaded model, its engine, and text to ids and back."""

    def __init__(self, loaded: Loaded) -> None:
        from forerun.generate.engine import Engine, has_cache

        if not has_cache(loaded.model):
            name = type(loaded.model).__name__
            warn(f"{name} has no `cache` and `extend`: every token is computed from the whole text, which is slow")
        self.loaded = loaded  # its weights belong to the engine
        self.engine: Engine = Engine(
            loaded.model, loaded.params, loaded.mesh, loaded.compute, loaded.eos, loaded.tokenizer.vocab, consume=True
        )

    def plain_ids(self, text: str) -> list[int]:
        """A plain prompt, with what the tokenizer puts in front of every text (Llama's <s>)."""
        return [int(token) for token in self.loaded.tokenizer.encode_prompt(text)]

    def chat_ids(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        """Return the tokens of conversations, as the model was trained on them, up to the answer."""
        from forerun.data.turns import chat_prompts

        loaded = self.loaded
        return chat_prompts(
            conversations,
            self.template(),
            loaded.special,
            loaded.tokenizer,
            special_tokens=loaded.special_tokens,
            origin=loaded.template_origin,
        )

    @property
    def turn_stop(self) -> tuple[str, ...]:
        """Texts that end a turn where no single token does."""
        return self.loaded.turn_stop

    def decode(self, ids: list[int]) -> str:
        return self.loaded.tokenizer.decode(ids)

    def template(self) -> str:
        """The chat template; an error if the model has none."""
        if self.loaded.chat_template is None:
            raise UserError(
                f"{self.loaded.name} has no chat template",
                why="neither its files nor the job of its run (data.chat_template) has one: it was not trained to chat",
                fix=f'use plain prompts: forerun generate {self.loaded.name} "Once upon a time"',
            )
        return self.loaded.chat_template


def opened(args: argparse.Namespace) -> Source:
    """Loads what the command names. Everything that can be wrong with its options is found before the weights."""
    mesh = _mesh(args.mesh)
    settings_of(args)
    from forerun.loop import loaded
    from forerun.loop.compilation import use_cache

    use_cache()
    found = loaded.load_model(
        args.source,
        revision=args.revision,
        device=args.device,
        devices=args.devices,
        mesh=mesh,
        dtype=args.dtype,
        code=args.code,
        tell=warn,
    )
    device = found.mesh.devices.flat[0]
    print(f"{found.name}: {found.mesh.size} x {device.device_kind}, {found.compute.dtype}", file=sys.stderr, flush=True)
    return Source(found)


def warn(text: str) -> None:
    """Print a warning, apart from what the command writes to stdout."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def settings_of(args: argparse.Namespace) -> Settings:
    from forerun.generate.engine import Settings
    from forerun.generate.sampling import Sampling

    return Settings(args.max_tokens, Sampling(args.temperature, args.top_k, args.top_p), args.seed)


def _mesh(text: str | None) -> MeshShape | None:
    if text is None:
        return None
    from forerun.hardware.mesh import MeshShape

    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(
            f"--mesh {text} is not a mesh", why="it is data x fsdp x tp, three numbers", fix="such as --mesh 1x4x2"
        )
    return MeshShape(*map(int, sizes))
