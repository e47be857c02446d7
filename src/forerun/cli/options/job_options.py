"""Options of commands that read or write a job file."""

from __future__ import annotations

import argparse

from forerun.cli.options.values import comma_list, count, dollars, hours


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the job file and the changes of its values."""
    parser.add_argument("job", metavar="JOB", help="job file in YAML")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="change a value of the job, for example optimizer.lr=8e-5",
    )


def add_stage_option(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add `--stage`, whose meaning depends on the command."""
    parser.add_argument("--stage", metavar="NAME", help=f"with stages: {meaning}")


def add_init_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun init`."""
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default="job.yaml", help="job file to write (default: job.yaml)"
    )
    parser.add_argument("--recipe", metavar="NAME", help="pretrain, sft, lora, qlora, distil, qat, dpo or custom")
    parser.add_argument(
        "--model", metavar="MODEL", help="name on the hub (owner/name), folder, or named size (random weights)"
    )
    parser.add_argument("--data", metavar="PATH", help="file or folder with the data")


def add_convert_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun convert`."""
    parser.add_argument("file", metavar="FILE", help="YAML file of axolotl or TRL, or TrainingArguments as JSON")
    parser.add_argument(
        "--devices", metavar="N", type=int, help="number of devices, which the batch depends on (default: 1)"
    )
    parser.add_argument("--model", metavar="MODEL", help="model, if the file does not name it")
    parser.add_argument("--data", metavar="PATH", help="data, if the file does not name it")


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun check`."""
    add_job_arguments(parser)
    add_stage_option(parser, "show only this stage (default: all)")
    parser.add_argument(
        "--on", metavar="SLICE", help="derive values for this slice instead of the devices of this machine"
    )
    parser.add_argument("--all", action="store_true", help="show all values, including defaults")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun data`."""
    add_job_arguments(parser)
    add_stage_option(parser, "the stage whose data is shown")
    parser.add_argument(
        "--samples",
        metavar="N",
        type=count,
        default=2,
        help="number of rows to show as the model sees them (default: 2)",
    )
    parser.add_argument("--full", action="store_true", help="show long rows completely")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts to this file")
    parser.add_argument(
        "--shard",
        metavar="I/N",
        nargs="?",
        const="auto",
        help="only tokenize share I of N, to divide the work among machines; "
        "auto, or no value: the share of this task of a Slurm array or a Kubernetes indexed job",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="only tokenize, on a Ray cluster: auto for the cluster of this machine, or HOST:PORT of its head node",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare all tokens with their checksums; add block checksums to an older store",
    )
    parser.add_argument("--ledger", metavar="FILE", help="compare the ledger.jsonl of a run with the order of this job")


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun tokenizer`."""
    parser.add_argument("action", metavar="ACTION", choices=("train", "show"), help="train: a new one; show: a report")
    parser.add_argument(
        "texts",
        metavar="TEXTS",
        nargs="+",
        help="files, folders or globs as in data.path, or a job file; for show, the tokenizer comes first",
    )
    parser.add_argument("--to", metavar="FOLDER", help="with train: folder to write; it must be empty or not exist")
    parser.add_argument(
        "--vocab", metavar="N", type=count, help="with train: number of tokens, bytes included (default: 8192)"
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


def add_provider_option(parser: argparse.ArgumentParser) -> None:
    """Add `--provider`, which selects prices."""
    parser.add_argument(
        "--provider",
        metavar="NAMES",
        type=comma_list,
        action="extend",
        default=[],
        help="use only prices of these providers, for example gcp,lambda (default: the cheapest)",
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun plan`."""
    add_job_arguments(parser)
    add_stage_option(parser, "plan only this stage (default: all, and their total)")
    parser.add_argument(
        "--on",
        metavar="SLICES",
        type=comma_list,
        help="slices and GPU machines to plan for, for example v6e-8,h100-8 (default: those that may fit)",
    )
    parser.add_argument("--zone", metavar="ZONE", help="use the prices of this zone (default: the cheapest)")
    add_provider_option(parser)
    parser.add_argument("--prices", metavar="FILE", help="use the prices in this file instead of list prices")
    parser.add_argument(
        "--max-usd", metavar="USD", type=dollars, help="budget: mark slices that cost more, and fail if all do"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts to this file")
    parser.add_argument(
        "--trace", metavar="FILE", help="with one slice: write the simulated timeline of a step for Perfetto"
    )
    parser.add_argument("--calibrate", metavar="RUNS", type=comma_list, help="correct the times by these finished runs")
    parser.add_argument("--no-cache", action="store_true", help="ignore cached results and compile again")
    parser.add_argument(
        "--search",
        action="store_true",
        help="search slices, meshes, micro-batch sizes and remat policies for the best plan",
    )
    parser.add_argument(
        "--search-all",
        dest="search",
        action="store_const",
        const="all",
        help="like --search, but compile all candidates that may fit, also those that are not expected to win",
    )
    parser.add_argument(
        "--goal",
        choices=("cheapest", "fastest", "balanced"),
        default="balanced",
        help="how to order slices, and what --search optimises for (default: balanced, time x money)",
    )
    parser.add_argument("--max-hours", metavar="H", type=hours, help="with --search: omit plans that take longer")
    parser.add_argument("--out", metavar="FILE", help="with --search: file for the best plan as a job")


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun cache`."""
    add_job_arguments(parser)
    add_stage_option(parser, "the stage whose teacher is cached (default: all that have distil.cache)")
    parser.add_argument(
        "--on",
        metavar="SLICES",
        type=comma_list,
        help="only predict size, time and price on these slices, for example v6e-1",
    )
    parser.add_argument("--zone", metavar="ZONE", help="with --on: use the prices of this zone (default: the cheapest)")
    add_provider_option(parser)
    parser.add_argument(
        "--prices", metavar="FILE", help="with --on: use the prices in this file instead of list prices"
    )


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun train`."""
    add_job_arguments(parser)
    add_stage_option(parser, "train only this stage (default: all, in their order)")
    parser.add_argument("--fresh", action="store_true", help="start over; an earlier run of this name is renamed")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="train a run that another process trains; the next save of that process fails",
    )
    parser.add_argument(
        "--profile", metavar="FIRST:LAST", help="record these steps with the JAX profiler, for TensorBoard and Perfetto"
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


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun profile`."""
    add_job_arguments(parser)
    add_stage_option(parser, "the stage to profile")
    parser.add_argument("--steps", metavar="N", type=count, default=5, help="number of steps to record (default: 5)")
    parser.add_argument(
        "--warmup", metavar="N", type=count, default=3, help="number of steps before the recording (default: 3)"
    )
    parser.add_argument("--to", metavar="FOLDER", help="folder for the trace (default: profiles/NAME)")


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun sweep`."""
    parser.add_argument("job", metavar="JOB", help="job file in YAML")
    parser.add_argument(
        "words",
        metavar="KEY=V1,V2",
        nargs="*",
        default=[],
        help="a key with several values is swept; one with a single value is the same for all runs",
    )
    parser.add_argument(
        "--parallel",
        metavar="N",
        type=count,
        default=1,
        help="train N runs at a time, each on its own devices (default: 1)",
    )
    parser.add_argument("--stop-on-failure", action="store_true", help="end the sweep when a run fails")
    parser.add_argument("--dry-run", action="store_true", help="only list the runs")
