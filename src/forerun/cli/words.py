"""The commands of the command line, their options and their help. A test freezes this list."""

from __future__ import annotations

import argparse

from forerun.cli import sweep
from forerun.cli.parser import Command, Parser


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
    parser.add_argument("job", metavar="JOB", help="job file in YAML")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="change a value of the job, for example optimizer.lr=8e-5",
    )


def _stage(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--stage", metavar="NAME", help=f"with stages: {meaning}")


def _check(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    _stage(parser, "show only this stage (default: all)")
    parser.add_argument(
        "--on", metavar="SLICE", help="derive values for this slice instead of the devices of this machine"
    )
    parser.add_argument("--all", action="store_true", help="show all values, including defaults")


def _train(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    _stage(parser, "train only this stage (default: all, in their order)")
    parser.add_argument("--fresh", action="store_true", help="start over; an earlier run of this name is renamed")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="train a run that another process trains; the next save of that process fails",
    )
    parser.add_argument("--supervise", action="store_true", help="restart the run if it crashes or makes no progress")
    parser.add_argument(
        "--host",
        metavar="I/N",
        help="host I of N, counted from 0 (with --leader), or auto on a TPU slice; implies --supervise",
    )
    parser.add_argument("--leader", metavar="ADDRESS", help="address of host 0 inside the cluster: HOST or HOST:PORT")
    parser.add_argument(
        "--secret", metavar="FILE", help="file with the secret of the run, the same on all hosts (or FORERUN_SECRET)"
    )


def _data(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    _stage(parser, "the stage whose data is shown")
    parser.add_argument(
        "--samples",
        metavar="N",
        type=_count,
        default=2,
        help="number of rows to show as the model sees them (default: 2)",
    )
    parser.add_argument("--full", action="store_true", help="show long rows completely")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts to this file")
    parser.add_argument("--shard", metavar="I/N", help="only tokenize share I of N, to divide the work among machines")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare all tokens with their checksums; add block checksums to an older store",
    )
    parser.add_argument("--ledger", metavar="FILE", help="compare the ledger.jsonl of a run with the order of this job")


def _plan(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    _stage(parser, "plan only this stage (default: all, and their total)")
    parser.add_argument(
        "--on",
        metavar="SLICES",
        type=_comma_list,
        help="slices to plan for, for example v6e-1,v5e-8 (default: those that may fit)",
    )
    parser.add_argument("--zone", metavar="ZONE", help="use the prices of this zone (default: the cheapest)")
    parser.add_argument("--prices", metavar="FILE", help="use the prices in this file instead of list prices")
    parser.add_argument(
        "--max-usd", metavar="USD", type=_dollars, help="budget: mark slices that cost more, and fail if all do"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts to this file")
    parser.add_argument(
        "--calibrate", metavar="RUNS", type=_comma_list, help="correct the times by these finished runs"
    )
    parser.add_argument("--no-cache", action="store_true", help="ignore cached results and compile again")
    parser.add_argument(
        "--search",
        action="store_true",
        help="search slices, meshes, micro-batch sizes and remat policies for the best plan",
    )
    parser.add_argument(
        "--goal",
        choices=("cheapest", "fastest", "balanced"),
        default="balanced",
        help="how to order slices, and what --search optimises for (default: balanced, time x money)",
    )
    parser.add_argument("--max-hours", metavar="H", type=_hours, help="with --search: omit plans that take longer")
    parser.add_argument("--out", metavar="FILE", help="with --search: file for the best plan as a job")


def _cache(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    _stage(parser, "the stage whose teacher is cached (default: all that have distil.cache)")
    parser.add_argument(
        "--on",
        metavar="SLICES",
        type=_comma_list,
        help="only predict size, time and price on these slices, for example v6e-1",
    )
    parser.add_argument("--zone", metavar="ZONE", help="with --on: use the prices of this zone (default: the cheapest)")
    parser.add_argument(
        "--prices", metavar="FILE", help="with --on: use the prices in this file instead of list prices"
    )


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run; with --push also an exported folder")
    parser.add_argument("--to", metavar="FOLDER", help="folder to write; it must not exist (with --push: optional)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: that of the base model, or of the run)",
    )
    parser.add_argument(
        "--step",
        metavar="STEP",
        type=_step,
        default="newest",
        help="newest, best (lowest validation loss) or a step (default: newest)",
    )
    _stage(parser, "the stage to write (default: the last)")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="for a run with adapters: write the complete model instead of a PEFT folder",
    )
    parser.add_argument(
        "--dense", action="store_true", help="for a run with qat: write rounded weights as floats instead of integers"
    )
    parser.add_argument(
        "--gguf",
        metavar="TYPE",
        nargs="?",
        const="q8_0",
        help="also write a GGUF file and an Ollama Modelfile: f16, bf16, f32, q8_0, q5_0, q4_0, q4_k_m (default: q8_0)",
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="upload the folder to this repository of the hub, which is created private"
    )
    parser.add_argument("--public", action="store_true", help="allow that everyone can see the repository of --push")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the files of the repository of --push if it has other content"
    )
    parser.add_argument("--code", metavar="FOLDER", help="for a run with a custom model class: folder of its module")


def _ask(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="folder of a run, Hugging Face folder, or name on the hub")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub name")
    parser.add_argument(
        "--code", metavar="FOLDER", help="for a run or an export of a custom model class: folder of its module"
    )


def _answer(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=_count,
        default=max_tokens,
        help=f"longest answer in tokens (default: {max_tokens})",
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.8,
        help="sampling temperature; 0 takes the most likely token (default: 0.8)",
    )
    parser.add_argument("--top-k", metavar="K", type=_count, help="sample from the K most likely tokens")
    parser.add_argument(
        "--top-p", metavar="P", type=float, help="sample from the most likely tokens with total probability P"
    )
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end the answer before this text; can be repeated"
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="random seed; the same seed gives the same answer (default: 0)"
    )
    parser.add_argument(
        "--device", choices=("auto", "tpu", "gpu", "cpu"), default="auto", help="device to use (default: auto)"
    )
    parser.add_argument("--devices", metavar="N", type=_count, help="number of devices (default: all)")
    parser.add_argument(
        "--mesh",
        metavar="DxFxT",
        help="sizes of data, fsdp and tp, for example 1x1x4 (default: all devices along fsdp)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of weights and arithmetic (default: bfloat16; on a CPU float32)",
    )


def _generate(parser: argparse.ArgumentParser) -> None:
    _ask(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue")
    parser.add_argument("--batch", metavar="FILE", help='JSONL file with {"prompt": ...} or {"messages": [...]} lines')
    parser.add_argument(
        "--out", metavar="FILE", help="with --batch: file for the answers; an existing file is continued"
    )
    parser.add_argument(
        "--rows",
        metavar="N",
        type=_count,
        default=8,
        help="with --batch: prompts that are answered together (default: 8)",
    )
    _answer(parser, 128)


def _chat(parser: argparse.ArgumentParser) -> None:
    _ask(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    _answer(parser, 1024)


def _eval(parser: argparse.ArgumentParser) -> None:
    _ask(parser)
    parser.add_argument(
        "--data", metavar="PATH", help="file or folder with held-out text, for loss, perplexity and bits per byte"
    )
    parser.add_argument(
        "--tasks",
        metavar="TASKS",
        type=_comma_list,
        help="tasks of lm-eval: names, YAML files or folders, for example a,b",
    )
    parser.add_argument(
        "--limit", metavar="N", type=_count, help="with --tasks: only the first N examples of each task"
    )
    parser.add_argument("--chat", action="store_true", help="with --tasks: use the chat template of the model")
    parser.add_argument(
        "--context", metavar="N", type=_count, help="longest input in tokens (default: that of the model)"
    )
    parser.add_argument(
        "--batch", metavar="N", type=_count, default=8, help="rows that are computed together (default: 8)"
    )
    parser.add_argument(
        "--device", choices=("auto", "tpu", "gpu", "cpu"), default="auto", help="device to use (default: auto)"
    )
    parser.add_argument("--devices", metavar="N", type=_count, help="number of devices (default: all)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of weights and arithmetic (default: bfloat16; on a CPU float32)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=("train", "show"), help="train: a new one; show: a report")
    parser.add_argument(
        "texts",
        metavar="TEXTS",
        nargs="+",
        help="files, folders or globs as in data.path, or a job file; for show, the tokenizer comes first",
    )
    parser.add_argument("--to", metavar="FOLDER", help="with train: folder to write; it must be empty or not exist")
    parser.add_argument(
        "--vocab", metavar="N", type=_count, help="with train: number of tokens, bytes included (default: 8192)"
    )
    parser.add_argument("--end", metavar="TEXT", help="with train: token that ends a document (default: <|endoftext|>)")
    parser.add_argument(
        "--special", metavar="TEXT", action="append", default=[], help="with train: special token; can be repeated"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="with train: chatml, a Jinja file, or none (default: chatml)"
    )
    parser.add_argument(
        "--split",
        choices=("qwen2", "llama3", "gpt2"),
        help="with train: how text is split into words; qwen2 separates digits (default: qwen2)",
    )
    parser.add_argument(
        "--normalize", choices=("none", "nfc"), help="with train: nfc composes accents (default: none, keeps all bytes)"
    )
    parser.add_argument(
        "--compare",
        metavar="TOKENIZER",
        action="append",
        default=[],
        help="another tokenizer for the report: folder, file or hub name; can be repeated",
    )


def _init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default="job.yaml", help="job file to write (default: job.yaml)"
    )
    parser.add_argument("--recipe", metavar="NAME", help="pretrain, sft, lora, qlora, distil, qat, dpo or custom")
    parser.add_argument(
        "--model", metavar="MODEL", help="name on the hub (owner/name), folder, or named size (random weights)"
    )
    parser.add_argument("--data", metavar="PATH", help="file or folder with the data")


def _convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="YAML file of axolotl or TRL, or TrainingArguments as JSON")
    parser.add_argument(
        "--devices", metavar="N", type=int, help="number of devices, which the batch depends on (default: 1)"
    )
    parser.add_argument("--model", metavar="MODEL", help="model, if the file does not name it")
    parser.add_argument("--data", metavar="PATH", help="data, if the file does not name it")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--smoke", action="store_true", help="also train for a minute on the devices of this machine")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="with --smoke: set device, devices or mesh, for example device=tpu",
    )


def _hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", nargs="?", help="chips, slices or prices (default: all)")
    parser.add_argument("--prices", metavar="FILE", help="use the prices in this file instead of list prices")
    parser.add_argument("--zone", metavar="ZONE", help="only prices of this zone")


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "code", metavar="CODE", nargs="?", help="error code such as E-DATA-017 (default: list all codes)"
    )


def _schema(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of the terminal")


COMMANDS = {
    "init": Command("write a first job file from a recipe", "forerun init --recipe lora job.yaml", _init),
    "convert": Command(
        "write a job from a file of axolotl, TRL or transformers", "forerun convert axolotl.yml --devices 8", _convert
    ),
    "check": Command("show every value of a job and its origin", "forerun check job.yaml --on v5e-8", _check),
    "data": Command("show the data as the model will see it", "forerun data job.yaml --html data.html", _data),
    "tokenizer": Command(
        "train a tokenizer on text, or show how one splits it",
        "forerun tokenizer train texts.txt --vocab 8192 --to tokenizer/",
        _tokenizer,
    ),
    "plan": Command("predict memory, time and cost without a TPU", "forerun plan job.yaml --on v6e-1,v5e-8", _plan),
    "cache": Command("store the logits of a job's teacher", "forerun cache job.yaml distil.top_k=32", _cache),
    "train": Command("train a job, or resume it", "forerun train job.yaml optimizer.lr=8e-5 mesh.fsdp=8", _train),
    "sweep": Command(
        "train all combinations of some values, and compare them",
        "forerun sweep job.yaml optimizer.lr=1e-5,3e-5 seed=0,1",
        sweep.add_options,
    ),
    "export": Command(
        "write a run as a verified Hugging Face folder", "forerun export runs/quickstart --to my-model", _export
    ),
    "generate": Command(
        "continue a prompt, or a file of prompts",
        "forerun generate runs/quickstart Once --temperature 0",
        _generate,
    ),
    "chat": Command("chat with a model in the terminal", "forerun chat HuggingFaceTB/SmolLM2-135M-Instruct", _chat),
    "eval": Command(
        "measure a model on held-out text or lm-eval tasks", "forerun eval runs/quickstart --data held_out.txt", _eval
    ),
    "doctor": Command("find problems of this machine", "forerun doctor --smoke", _doctor),
    "hardware": Command("print the tables of chips, slices and prices", "forerun hardware slices", _hardware),
    "explain": Command("explain an error code and its fix", "forerun explain E-JOB-018", _explain),
    "schema": Command(
        "print the JSON Schema of a job, for editors", "forerun schema --output job.schema.json", _schema
    ),
}

GLOBAL_OPTIONS = {
    "--help": "show this text; forerun COMMAND --help shows the options of a command",
    "--version": "print the version",
    "--debug": "show the traceback of an error",
}


def parser_of(name: str) -> Parser:
    """Return the parser of a command."""
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
    """Return the text of `forerun --help`."""
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
