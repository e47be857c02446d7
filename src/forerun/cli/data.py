"""`forerun data` and `forerun tokenizer`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forerun.cli.arguments import options_of
from forerun.cli.jobs import planned_jobs, print_warnings
from forerun.errors import UserError
from forerun.verbs.option_types import File, Folder, JobFile, Name, Override, Value

if TYPE_CHECKING:
    from forerun.config.schema import Job


@options_of("forerun.verbs.data:inspect_data")
def data(
    job: JobFile,
    *overrides: Override,
    stage: Name | None = None,
    full: bool = False,
    html: File | None = None,
    shard: Annotated[str, Value("I/N", without_value="auto")] | None = None,
    ray: Annotated[str, Value("ADDRESS")] | None = None,
    verify: bool = False,
    ledger: File | None = None,
    **options: Any,
) -> int:
    """Print what the model will see, or tokenize, verify or compare the data.

    Args:
      stage: with stages: the stage whose data is shown
      full: show long rows completely
      html: write a page with charts to this file
      shard: only tokenize share I of N, to divide the work among machines; auto, or no value: the share of this task of
        a Slurm array or a Kubernetes indexed job
      ray: only tokenize, on a Ray cluster: auto for the cluster of this machine, or HOST:PORT of its head node
      verify: compare all tokens with their checksums
      ledger: compare the ledger.jsonl of a run with the order of this job
    """
    from forerun.resolve.resolve_model import resolve_model
    from forerun.verbs.data import compare_ledger, verify_data
    from forerun.verbs.job_files import load_job

    chosen = load_job(job, *overrides) if stage is None else planned_jobs(job, overrides, stage)[0]
    if html and not Path(html).absolute().parent.is_dir():
        raise UserError(
            "E-COMMAND-006",
            f"--html {html}: there is no such folder",
            why="the page is written there",
            fix="make the folder first",
        )
    resolved = resolve_model(chosen)
    print_warnings(resolved)
    if shard or ray:
        _tokenize(chosen, shard_of(shard or "0/1", os.environ), ray)
    elif verify:
        for name, part in verify_data(chosen).items():
            print(f"{name}: {part}")
    elif ledger:
        print(f"{ledger}: {compare_ledger(chosen, ledger)}")
    else:
        _show(resolved.job, resolved.starting_weights, full, html, options)
    return 0


def _show(job: Job, weights: str, full: bool, html: str | os.PathLike[str] | None, options: dict[str, Any]) -> None:
    from forerun.console import SafeConsole
    from forerun.data.reads.cache_size import bucket_cache
    from forerun.units import Bytes
    from forerun.verbs.data import PIPED_COLUMNS, inspect_data

    report = inspect_data(job, **options)
    for text in report.warnings:
        print(f"warning: {text}", file=sys.stderr)
    print(f"model: {weights}")
    report.print(SafeConsole(width=None if sys.stdout.isatty() else PIPED_COLUMNS), full=full)
    if (cache := bucket_cache(job.data)) is not None:
        print(f"local cache: {Bytes(cache.limit_bytes)}, {cache.reason}")
    if html:
        report.save_html(html)
        print(f"page: {html}")


def _tokenize(job: Job, shard: tuple[int, int], ray: str | None) -> None:
    from forerun.verbs.data import tokenize_data

    share = "the data" if shard == (0, 1) else f"shard {shard[0]}/{shard[1]}"
    for name, (folder, is_complete) in tokenize_data(job, shard=shard, ray=ray).items():
        state = "all units are complete" if is_complete else "other shards are still missing"
        print(f"{name}: {share} is in {folder}; {state}")


# ---- Shares of the work ----


AUTO = "auto"
SLURM, KUBERNETES = "SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX"


def shard_of(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the share (i, n), with i from 0 to n - 1.

    Args:
      text: `I/N`; `auto`; or `auto/N`, for a scheduler that gives only the number of a task.
      environment: the environment variables.

    Raises:
      UserError: The text is not a share, or the scheduler does not give one.
    """
    index, slash, count = text.partition("/")
    if index == AUTO and (not slash or (count.isdecimal() and int(count) > 0)):
        return _from_scheduler(environment, int(count) if slash else None)
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UserError(
            "E-COMMAND-008",
            f"--shard {text}",
            why="it is I/N with I from 0 to N-1, or auto, or auto/N",
            fix="for four shards: 0/4, 1/4, 2/4 and 3/4; in an array of a scheduler: auto",
        )
    return int(index), int(count)


def _from_scheduler(environment: Mapping[str, str], count: int | None) -> tuple[int, int]:
    found = [name for name in (SLURM, KUBERNETES) if environment.get(name)]
    if len(found) != 1:
        raise UserError(
            "E-COMMAND-090",
            "--shard auto: the number of this task is not known",
            why=f"{' and '.join(found)} are both set" if found else f"neither {SLURM} nor {KUBERNETES} is set",
            fix="name the share: --shard I/N",
        )
    name = found[0]
    if count is None:
        index, count = _slurm(environment) if name == SLURM else _kubernetes(environment)
    else:
        index = _number(environment, name)
    if not 0 <= index < count:
        raise UserError(
            "E-COMMAND-091",
            f"--shard auto: task {index} of {count}",
            why=f"{name} is {environment[name]}, and the shares are 0 to {count - 1}",
            fix="start one task for each share, for example `sbatch --array=0-9` for 10 shares",
        )
    return index, count


def _slurm(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the place of this task in its array, such as (1, 3) for task 4 of `--array=2-6:2`."""
    task = _number(environment, SLURM)
    least = _number(environment, "SLURM_ARRAY_TASK_MIN")
    count = _number(environment, "SLURM_ARRAY_TASK_COUNT")
    step = _number(environment, "SLURM_ARRAY_TASK_STEP") if environment.get("SLURM_ARRAY_TASK_STEP") else 1
    most = environment.get("SLURM_ARRAY_TASK_MAX", "")
    uneven = step < 1 or (task - least) % step or (most.isdecimal() and int(most) != least + step * (count - 1))
    if uneven:
        raise UserError(
            "E-COMMAND-092",
            "--shard auto: the tasks of the Slurm array are not evenly spaced",
            why=f"task {task} of {count} tasks from {least} to {most or '?'} in steps of {step}",
            fix="use a range such as --array=0-9, or name the number of shares: --shard auto/N",
        )
    return (task - least) // step, count


def _kubernetes(environment: Mapping[str, str]) -> tuple[int, int]:
    if not environment.get("JOB_COMPLETIONS"):
        raise UserError(
            "E-COMMAND-093",
            "--shard auto: the number of shares is not known",
            why=f"{KUBERNETES} is set, but JOB_COMPLETIONS is not: Kubernetes does not set it",
            fix="name the number of completions: --shard auto/N, or set the variable JOB_COMPLETIONS in the Job",
        )
    return _number(environment, KUBERNETES), _number(environment, "JOB_COMPLETIONS")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UserError(
            "E-COMMAND-094",
            f"--shard auto: {name} is not a number",
            why=f"it is {text!r}" if text else "it is not set",
            fix="name the share: --shard I/N",
        )
    return int(text)


# ---- forerun tokenizer ----


@options_of("forerun.verbs.tokenizer:train_tokenizer", omit=("data",))
def tokenizer(
    action: Annotated[Literal["train", "show"], Value("ACTION")],
    texts: Annotated[Sequence[str], Value("TEXTS")],
    *,
    to: Folder | None = None,
    **options: Any,
) -> int:
    """Train a tokenizer, or print the report of an existing one.

    Args:
      action: train: a new one; show: a report
      texts: files, folders or globs as in data.path, or a job file; for show, the tokenizer comes first
    """
    if action == "show":
        return _show_split(texts, {"to": to, **options} if to else options)

    from forerun.verbs.tokenizer import train_tokenizer

    if to is None:
        raise UserError(
            "E-COMMAND-031",
            "--to is missing",
            why="forerun tokenizer train writes a folder",
            fix="name it, for example --to tokenizer/",
        )
    if options.get("chat_template") == "none":
        options["chat_template"] = None
    trained = train_tokenizer(texts, to, **options)
    for text in trained.warnings:
        print(f"warning: {text}", file=sys.stderr)
    print(trained)
    return 0


def _show_split(texts: Sequence[str], options: dict[str, Any]) -> int:
    from forerun.verbs.tokenizer import inspect_tokenizer

    name, *data = texts
    if not data:
        raise UserError(
            "E-COMMAND-032",
            "forerun tokenizer show needs a tokenizer and text",
            why=f"only {name} is given",
            fix=f"add files with text, for example: forerun tokenizer show {name} texts.txt",
        )
    if of_train := [option for option in options if option != "compare"]:
        flag = "--split" if of_train[0] == "splitting" else f"--{of_train[0].replace('_', '-')}"
        raise UserError(
            "E-COMMAND-033",
            f"{flag} is an option of forerun tokenizer train",
            why="show reads an existing tokenizer and writes nothing",
            fix=f"remove {flag}, or write train instead of show",
        )
    print("\n".join(inspect_tokenizer(name, data, **options).lines()))
    return 0
