"""The argument parser of a command. Mistakes are UserErrors that suggest what was meant."""

from __future__ import annotations

import argparse
from typing import NoReturn

from forerun.errors import UserError, did_you_mean

OF_SEVERAL_HOSTS = ("--host", "--leader", "--secret")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split())
        raise UserError("E-COMMAND-023", f"{self.prog}: {message}", why=usage, fix=f"see: {self.prog} --help")

    def read(self, words: list[str]) -> argparse.Namespace:
        """Parse the arguments. Options may come before, between or after the overrides."""
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self._refuse(unknown[0], words)
        return args

    def _refuse(self, word: str, words: list[str]) -> NoReturn:
        if word.partition("=")[0] in OF_SEVERAL_HOSTS:
            raise UserError(
                "E-COMMAND-024",
                f"{self.prog} runs on one host",
                why=f"'{word}' is an option of forerun train, which runs on several hosts together",
                fix=f"remove it, and start {self.prog} on one of the hosts",
            )
        known = [option for action in self._actions for option in action.option_strings]
        # The dashes that all options share would make any two short ones similar.
        near = did_you_mean(word.partition("=")[0].lstrip("-"), [option.lstrip("-") for option in known])
        near = self._override(word, words) or (f"--{near}" if near else None)
        fix = f"did you mean '{near}'?" if near else f"see: {self.prog} --help"
        kind = "option" if word.startswith("-") else "word"
        raise UserError("E-COMMAND-025", f"unknown {kind} '{word}'", why=f"{self.prog} does not know it", fix=fix)

    def _override(self, word: str, words: list[str]) -> str | None:
        """Return the override that an unknown option such as `--steps 10` or `--lr=3e-4` means: `steps=10`."""
        if not word.startswith("--") or "overrides" not in (action.dest for action in self._actions):
            return None
        from forerun.config import keys  # slow to import, and needed for this error only
        from forerun.config.migration.suggestion import overrides

        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        following = words[words.index(word) + 1 :] if not equals else [value]
        given = next((text for text in following[:1] if not text.startswith("--") and "=" not in text), "")
        if name in (*keys.leaf_keys(), *keys.shorthands()):
            return f"{name}={given or '...'}"
        ends = {key.rpartition(".")[2]: key for key in reversed(keys.leaf_keys())}
        return overrides(name, given) or (f"{ends[name]}={given or '...'}" if name in ends else None)
