"""The words of the command line: every command, its options and its help. A test freezes this list."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from forerun.errors import UserError, did_you_mean

OF_SEVERAL_HOSTS = ("--host", "--leader", "--secret")


@dataclass(frozen=True)
class Command:
    """One line of help, one example, and what may follow the command's name."""

    summary: str
    example: str
    add_options: Callable[[argparse.ArgumentParser], None]


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are UserErrors."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split())
        raise UserError(f"{self.prog}: {message}", why=usage, fix=f"see: {self.prog} --help")

    def read(self, words: list[str]) -> argparse.Namespace:
        """Options may stand before, between or after the overrides."""
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self._refuse(unknown[0], words)
        return args

    def _refuse(self, word: str, words: list[str]) -> NoReturn:
        if word.partition("=")[0] in OF_SEVERAL_HOSTS:
            raise UserError(
                f"{self.prog} runs on one host",
                why=f"'{word}' is for forerun train, which several hosts do together",
                fix=f"leave it out, and start {self.prog} on one of them",
            )
        known = [option for action in self._actions for option in action.option_strings]
        # The dashes that all options share would make any two short ones similar.
        near = did_you_mean(word.partition("=")[0].lstrip("-"), [option.lstrip("-") for option in known])
        near = self._override(word, words) or (f"--{near}" if near else None)
        fix = f"did you mean '{near}'?" if near else f"see: {self.prog} --help"
        kind = "option" if word.startswith("-") else "word"
        raise UserError(f"unknown {kind} '{word}'", why=f"{self.prog} does not know it", fix=fix)

    def _override(self, word: str, words: list[str]) -> str | None:
        """Return the override that an unknown option such as `--steps 10` or `--lr=3e-4` means: `steps=10`."""
        if not word.startswith("--") or "overrides" not in (action.dest for action in self._actions):
            return None
        from forerun.config import aliases, keys  # slow to import, and needed for this error only

        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        ends = {key.rpartition(".")[2]: key for key in reversed(keys.leaf_keys())}
        shorthands = keys.shorthands()
        key = name if name in (*keys.leaf_keys(), *shorthands) else aliases.key_alias(name) or ends.get(name)
        if key is None:
            return None
        following = words[words.index(word) + 1 :] if not equals else [value]
        given = next((text for text in following[:1] if not text.startswith("--") and "=" not in text), "")
        return f"{key}={given or '...'}"


def _comma_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _dollars(text: str) -> float:
    return _positive(text.removeprefix("$"), f"{text!r} is not an amount of dollars such as 50")


def _hours(text: str) -> float:
    return _positive(text.removesuffix("h"), f"{text!r} is not a number of hours such as 12")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _step(text: str) -> str:
    if text not in ("newest", "best") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not newest, best or a number")
    return text


def _positive(text: str, mistake: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(mistake)
    return value


def _job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="the job file, YAML")
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", default=[], help="change the job: optimizer.lr=8e-5"
    )


def _check(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument("--on", metavar="SLICE", help="derive for this slice instead of the devices that are here")
    parser.add_argument("--all", action="store_true", help="show all values, also those that have their defaults")


def _train(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument("--fresh", action="store_true", help="start over in a run folder that exists")
    parser.add_argument(
        "--take-over", action="store_true", help="train a run that another process trains; that one then fails"
    )
    parser.add_argument("--supervise", action="store_true", help="start again when the run dies or stands still")
    parser.add_argument(
        "--host", metavar="I/N", help="this is host I of N, from 0 (with --leader); auto on a TPU slice; supervised"
    )
    parser.add_argument("--leader", metavar="ADDRESS", help="of host 0 inside the cluster: HOST or HOST:PORT")
    parser.add_argument("--secret", metavar="FILE", help="the run's own, the same on all hosts (or FORERUN_SECRET)")


def _data(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument(
        "--samples", metavar="N", type=_count, default=2, help="rows to show, as the model sees them (2)"
    )
    parser.add_argument("--full", action="store_true", help="show the rows whole")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts, one file")
    parser.add_argument("--shard", metavar="I/N", help="only tokenize, and only share I of N: for many machines")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare all tokens with their checksums; upgrade a store without checksums of blocks",
    )
    parser.add_argument("--ledger", metavar="FILE", help="compare a run's ledger.jsonl with the order of this job")


def _plan(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument(
        "--on", metavar="SLICES", type=_comma_list, help="slices, as v6e-1,v5e-8; without it the sensible ones of all"
    )
    parser.add_argument("--zone", metavar="ZONE", help="prices of this zone; without it the cheapest zone")
    parser.add_argument("--prices", metavar="FILE", help="your own prices in place of list prices")
    parser.add_argument("--max-usd", metavar="USD", type=_dollars, help="mark what costs more; fail if all does")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts, one file")
    parser.add_argument("--calibrate", metavar="RUNS", type=_comma_list, help="correct the times by finished runs")
    parser.add_argument("--no-cache", action="store_true", help="compile again what was compiled before")
    parser.add_argument("--search", action="store_true", help="look for the best slice, mesh, micro-batch and remat")
    parser.add_argument(
        "--goal",
        choices=("cheapest", "fastest", "balanced"),
        default="balanced",
        help="the order of the slices, and what --search optimises for (default: balanced, time x money)",
    )
    parser.add_argument("--max-hours", metavar="H", type=_hours, help="of the search: leave out what takes longer")
    parser.add_argument("--out", metavar="FILE", help="of the search: the winning job file")


def _cache(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument(
        "--on", metavar="SLICES", type=_comma_list, help="only say size, time and price on these slices, as v6e-1"
    )
    parser.add_argument("--zone", metavar="ZONE", help="of --on: prices of this zone; without it the cheapest zone")
    parser.add_argument("--prices", metavar="FILE", help="of --on: your own prices in place of list prices")


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run, as runs/quickstart")
    parser.add_argument("--to", metavar="FOLDER", required=True, help="the folder to write; it must not exist yet")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (the base model's, or the run's)"
    )
    parser.add_argument(
        "--step", metavar="STEP", type=_step, default="newest", help="newest, best (lowest loss) or a number (newest)"
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a run with adapters: the whole model, not a PEFT folder"
    )
    parser.add_argument(
        "--dense", action="store_true", help="of a run with qat: rounded weights as floats, not integers"
    )


def _ask(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a run's folder, a Hugging Face folder or a name on the hub")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub name")
    parser.add_argument("--code", metavar="FOLDER", help="of a run with a custom model class: where its module is")


def _answer(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument(
        "--max-tokens", metavar="N", type=_count, default=max_tokens, help=f"of an answer ({max_tokens})"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0: always the likeliest token (0.8)"
    )
    parser.add_argument("--top-k", metavar="K", type=_count, help="choose from the K likeliest tokens")
    parser.add_argument("--top-p", metavar="P", type=float, help="choose from the likeliest tokens that make up P")
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be given more than once"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="the same seed, the same answer (0)")
    parser.add_argument("--device", choices=("auto", "tpu", "gpu", "cpu"), default="auto", help="where (auto)")
    parser.add_argument("--devices", metavar="N", type=_count, help="how many of them; all without it")
    parser.add_argument("--mesh", metavar="DxFxT", help="data x fsdp x tp, as 1x1x4; without it all along fsdp")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of weights and arithmetic (bfloat16; on a CPU float32)"
    )


def _generate(parser: argparse.ArgumentParser) -> None:
    _ask(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to go on from")
    parser.add_argument("--batch", metavar="FILE", help='JSONL with {"prompt": ...} or {"messages": [...]} lines')
    parser.add_argument("--out", metavar="FILE", help="of --batch: the answers; a file that exists is continued")
    parser.add_argument("--rows", metavar="N", type=_count, default=8, help="of --batch: answered together (8)")
    _answer(parser, 128)


def _chat(parser: argparse.ArgumentParser) -> None:
    _ask(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    _answer(parser, 1024)


def _eval(parser: argparse.ArgumentParser) -> None:
    _ask(parser)
    parser.add_argument("--data", metavar="PATH", help="held-out text, a file or a folder: loss, perplexity, bits/byte")
    parser.add_argument(
        "--tasks", metavar="TASKS", type=_comma_list, help="of lm-eval: names, YAML files or folders, as a,b"
    )
    parser.add_argument("--limit", metavar="N", type=_count, help="of --tasks: only the first N examples of each")
    parser.add_argument("--chat", action="store_true", help="of --tasks: ask through the model's chat template")
    parser.add_argument("--context", metavar="N", type=_count, help="longest input in tokens; the model's without it")
    parser.add_argument("--batch", metavar="N", type=_count, default=8, help="rows that are computed together (8)")
    parser.add_argument("--device", choices=("auto", "tpu", "gpu", "cpu"), default="auto", help="where (auto)")
    parser.add_argument("--devices", metavar="N", type=_count, help="how many of them; all without it")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of weights and arithmetic (bfloat16; on a CPU float32)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", default="job.yaml", help="the job file to write (job.yaml)")
    parser.add_argument("--recipe", metavar="NAME", help="pretrain, sft, lora, qlora, distil, qat, dpo or custom")
    parser.add_argument(
        "--model", metavar="MODEL", help="owner/name on the hub, or a folder; a named size has random weights"
    )
    parser.add_argument("--data", metavar="PATH", help="a file or a folder")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--smoke", action="store_true", help="also train for a minute on what is here")


def _hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", nargs="?", help="chips, slices or prices; all without it")
    parser.add_argument("--prices", metavar="FILE", help="your own prices instead of the list prices")
    parser.add_argument("--zone", metavar="ZONE", help="only the prices of this zone")


def _schema(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of the terminal")


COMMANDS = {
    "init": Command("write a job to begin with", "forerun init --recipe lora job.yaml", _init),
    "check": Command("show every value of a job and where it came from", "forerun check job.yaml --on v5e-8", _check),
    "data": Command("look at the data as the model will see it", "forerun data job.yaml --html data.html", _data),
    "plan": Command(
        "without a TPU: does a job fit, how long, how much?", "forerun plan job.yaml --on v6e-1,v5e-8", _plan
    ),
    "cache": Command("write down once what a job's teacher says", "forerun cache job.yaml distil.top_k=32", _cache),
    "train": Command(
        "train, or go on where the run stopped", "forerun train job.yaml optimizer.lr=8e-5 mesh.fsdp=8", _train
    ),
    "export": Command(
        "write a run as a Hugging Face folder, proven", "forerun export runs/quickstart --to my-model", _export
    ),
    "generate": Command(
        "go on from a prompt, or from a file of them",
        "forerun generate runs/quickstart Once --temperature 0",
        _generate,
    ),
    "chat": Command("talk with a model in the terminal", "forerun chat HuggingFaceTB/SmolLM2-135M-Instruct", _chat),
    "eval": Command(
        "measure a model: held-out text, lm-eval tasks", "forerun eval runs/quickstart --data held_out.txt", _eval
    ),
    "doctor": Command("look for what is wrong with this machine", "forerun doctor --smoke", _doctor),
    "hardware": Command("print the tables of chips, slices and prices", "forerun hardware slices", _hardware),
    "schema": Command(
        "print the JSON Schema of a job, for editors", "forerun schema --output job.schema.json", _schema
    ),
}

GLOBAL_OPTIONS = {
    "--help": "this text; forerun COMMAND --help says more",
    "--version": "print the version",
    "--debug": "show the traceback of an error",
}


def parser_of(name: str) -> Parser:
    """The parser of one command."""
    command = COMMANDS[name]
    parser = Parser(
        prog=f"forerun {name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}",
        epilog=f"example: {command.example}",
        allow_abbrev=False,
    )
    command.add_options(parser)
    parser.add_argument("--debug", action="store_true", help=GLOBAL_OPTIONS["--debug"])
    return parser


def help_text() -> str:
    """The whole of `forerun --help`."""
    lines = [
        "forerun trains language models on TPU, GPU and CPU from one job file, and plans them without a TPU.",
        "",
        "usage: forerun COMMAND ...",
        "",
        "commands:",
        *(f"  {name:<11}{command.summary}" for name, command in COMMANDS.items()),
        "",
        "options:",
        *(f"  {name:<11}{meaning}" for name, meaning in GLOBAL_OPTIONS.items()),
        "",
        "examples:",
        *(f"  {COMMANDS[name].example}" for name in ("check", "plan", "train")),
    ]
    return "\n".join(lines)
