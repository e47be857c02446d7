"""The program that runs the code blocks of pages: `python page_runner.py WORK TINY`. Each line of its input is a page.

Each page has its own folder in WORK, with the files that its examples name. Commands run in this process, because the
import of jax would be most of their time, and with few steps on one device. TINY is a folder with a tiny model. For
each block, one JSON line is printed: page, line, language, CPU seconds, what it prints, and the problem or null. A line
without a block ends each page.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from code_blocks import SHELL, Block, blocks_of

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("bench", "docs", "examples", "scripts")
TINY_JOB = "model: {layers: 1, embed: 16, heads: 2}\ndata: texts\nsequence: 16\nbatch: 8\nsteps: 2\n"
SMALL = ("steps=2", "sample.tokens=2", "device=cpu", "devices=1")
WITH_JOB = ("cache", "check", "data", "plan", "profile", "sweep", "train")
SHORTENED = ("cache", "sweep", "train")
SENTENCE = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do. "


class BlockError(Exception):
    """A block of a page does not do what the page says."""


def rows(count: int, **columns: Any) -> str:
    """Return rows of JSON, in which `#` is the number of the row."""
    return "".join(json.dumps(columns).replace("#", str(n)) + "\n" for n in range(count))


def files() -> dict[str, str]:
    """Return the files that examples of pages read, by their name."""
    chats = rows(
        600, messages=[{"role": "user", "content": "What is #?"}, {"role": "assistant", "content": "It is #."}]
    )
    texts = rows(64, text=f"Row #. {SENTENCE}")
    return {
        "job.yaml": TINY_JOB,
        "texts/alice.txt": SENTENCE * 60,
        "text/alice.txt": SENTENCE * 60,
        "books/alice.txt": SENTENCE * 200,
        "held_out.txt": SENTENCE * 4,
        "text.txt": SENTENCE * 2000,
        "wikitext.txt": "\n\n".join([SENTENCE * 8] * 40),
        "stories.txt": "<|endoftext|>".join([SENTENCE] * 40),
        "stories.jsonl": texts,
        "letters.jsonl": texts * 4,
        "rows/1.jsonl": rows(40, content=SENTENCE),
        "thoughts.jsonl": rows(40, question="What is #?", reasoning="Count.", answer="#"),
        "chats.jsonl": chats,
        "calls.jsonl": chats,
        "conversations.jsonl": chats,
        "openhermes.jsonl": chats,
        "pairs.jsonl": rows(64, prompt="What is #?", chosen="It is #.", rejected="No."),
        "prompts.jsonl": rows(2, prompt="Alice was"),
        "axolotl.yml": "base_model: Qwen/Qwen3-0.6B\n"
        "datasets: [{path: chats.jsonl, ds_type: json, type: chat_template}]\n"
        "sequence_len: 512\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nnum_epochs: 1\nlearning_rate: 2e-4\n",
        "training_args.json": json.dumps({"per_device_train_batch_size": 2, "max_steps": 10, "learning_rate": 1e-4}),
    }


def prepare(folder: Path, tiny: Path) -> None:
    """Create the folder of a page, as if it were the root of a clone."""
    folder.mkdir(parents=True)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name, text in files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    (folder / "tiny").symlink_to(tiny)


def shortened(words: list[str], overrides: tuple[str, ...]) -> list[str]:
    """Return a command of forerun with the overrides that make it short."""
    if words[0] in WITH_JOB and "--help" not in words:
        return [*words, *(SMALL if words[0] in SHORTENED else ()), *overrides]
    return words


def run_forerun(words: list[str]) -> tuple[int, str, str]:
    """Run a command of forerun in this process. Return its exit code and both outputs."""
    from forerun.cli.main import main
    from forerun.models.plugin import use_job_folder

    use_job_folder(None)
    for name, module in list(sys.modules.items()):
        if "/examples/" in str(getattr(module, "__file__", "")):
            del sys.modules[name]  # classes beside a job: another page has them in another folder
    out, err = io.StringIO(), io.StringIO()
    before = sys.stdin
    sys.stdin = io.StringIO("")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    finally:
        sys.stdin = before
    return code, out.getvalue(), err.getvalue()


def run_command(command: str, block: Block) -> None:
    """Run one line of a shell block. Raise BlockError if it fails, or does not fail as the page says."""
    words = shlex.split(command, comments=True)
    target = None
    if len(words) > 2 and words[-2] == ">":
        words, target = words[:-2], Path(words[-1])
    variables = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    simple = words[0] == "forerun" and not {"&&", "|", "&", ";", "<"} & set(words)
    if simple:
        with patch.dict(os.environ, variables):
            code, out, err = run_forerun(shortened(words[1:], block.overrides))
        if target is not None and code == 0:
            target.write_text(out, "utf-8")
    else:
        done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    expected = block.expected_errors().get(command)
    if expected is not None and (code == 0 or f"[{expected}]" not in err):
        raise BlockError(f"{command}\nexit code {code} without {expected}\n{err[-1500:]}")
    if expected is None and code != 0:
        raise BlockError(f"{command}\nexit code {code}\n{out[-1500:]}\n{err[-1500:]}")


def check_yaml(block: Block) -> None:
    """Read a block of a job. A part of a job is read together with a tiny model, and a complete one is `job.yaml`."""
    from forerun.config.load import load
    from forerun.verbs.stages import load_stages

    content = yaml.safe_load(block.text)
    if block.title is not None and not block.title.startswith("/"):
        Path(block.title).parent.mkdir(parents=True, exist_ok=True)
        Path(block.title).write_text(block.text, "utf-8")
    if "task" in content:  # a task of lm-eval
        return
    complete = "model" in content and "data" in content
    path = Path(block.title or ("job.yaml" if complete else "part.yaml"))
    whole = {"model": {"layers": 1, "embed": 16, "heads": 2}, "data": "texts", **content}
    path.write_text(block.text if complete else yaml.safe_dump(whole), "utf-8")
    if "stages" in content:
        load_stages(path)
    else:
        load(path)


def run_block(block: Block, names: dict[str, Any]) -> str:
    """Run a block in the folder of its page, and return what a Python block prints."""
    for command in block.first:
        run_command(command, block)
    if block.language in (*SHELL, "console"):
        if any(line.rstrip().endswith("&") for line in block.commands()):
            run_command("\n".join(block.commands()), block)
            return ""
        for command in block.commands():
            run_command(command, block)
    elif block.language == "python":
        code = compile(block.text, f"line {block.line}", "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        return printed.getvalue()
    elif block.language == "yaml":
        check_yaml(block)
    elif block.language == "json":
        json.loads(block.text)
    return ""


def run_page(page: Path, folder: Path, tiny: Path, report: Any) -> None:
    """Run all blocks of a page in order, and report each. Later blocks also run after a failure."""
    prepare(folder, tiny)
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("import forerun as fr", names)
    for block in blocks_of(page):
        if not block.is_run:
            continue
        began, problem, printed = sum(os.times()[:4]), None, ""
        try:
            printed = run_block(block, names)
        except BlockError as error:
            problem = str(error)
        except BaseException:
            problem = traceback.format_exc()[-3000:]
        seconds = round(sum(os.times()[:4]) - began, 1)  # of the CPU, also of child processes
        line = {"page": str(page), "line": block.line, "language": block.language, "cpu_seconds": seconds}
        line |= {"printed": printed, "problem": problem}
        print(json.dumps(line), file=report, flush=True)


def main() -> None:
    """Run the pages that the input names. Commands of a page get an empty input."""
    work, tiny = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    pages, report = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, line in enumerate(pages):
        page = Path(line.rstrip("\n"))
        run_page(page, work / f"{number}-{page.stem}", tiny, report)
        print(json.dumps({"page": str(page), "line": None}), file=report, flush=True)


if __name__ == "__main__":
    main()
