"""The share of the work that `--shard` names: `I/N`, or the number that a scheduler gives to each task of an array."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.errors import UserError

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
