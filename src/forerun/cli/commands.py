"""The commands of the command line and the functions that run them. A test freezes this list."""

from __future__ import annotations

from typing import NamedTuple

from forerun.cli.arguments import load_function, make_parser
from forerun.cli.parser import Parser


class Command(NamedTuple):
    """A command: its function as `module:name`, one line of help, and an example."""

    function: str
    summary: str
    example: str


COMMANDS = {
    "init": Command(
        "forerun.cli.job_files:init", "write a first job file from a recipe", "forerun init --recipe lora job.yaml"
    ),
    "convert": Command(
        "forerun.cli.job_files:convert",
        "write a job from a file of axolotl, TRL or transformers",
        "forerun convert axolotl.yml --devices 8",
    ),
    "check": Command(
        "forerun.cli.jobs:check", "show every value of a job and its origin", "forerun check job.yaml --on v5e-8"
    ),
    "data": Command(
        "forerun.cli.data:data", "show the data as the model will see it", "forerun data job.yaml --html data.html"
    ),
    "tokenizer": Command(
        "forerun.cli.data:tokenizer",
        "train a tokenizer on text, or show how one splits it",
        "forerun tokenizer train texts.txt --vocab 8192 --to tokenizer/",
    ),
    "plan": Command(
        "forerun.cli.plan:plan",
        "predict memory, time and cost without a TPU or GPU",
        "forerun plan job.yaml --on v6e-1,v5e-8",
    ),
    "cache": Command(
        "forerun.cli.jobs:cache", "store the logits of a job's teacher", "forerun cache job.yaml distil.top_k=32"
    ),
    "train": Command(
        "forerun.cli.train:train",
        "train a job, or resume it",
        "forerun train job.yaml optimizer.lr=8e-5 mesh.fsdp=8",
    ),
    "profile": Command(
        "forerun.cli.jobs:profile",
        "record a few steps of a job with the JAX profiler",
        "forerun profile job.yaml --steps 5",
    ),
    "sweep": Command(
        "forerun.cli.sweep:sweep",
        "train all combinations of some values, and compare them",
        "forerun sweep job.yaml optimizer.lr=1e-5,3e-5 seed=0,1",
    ),
    "report": Command(
        "forerun.cli.reports:report",
        "show the results and curves of a run",
        "forerun report runs/quickstart --html report.html",
    ),
    "compare": Command(
        "forerun.cli.reports:compare",
        "compare the results, curves and jobs of runs",
        "forerun compare runs/first runs/second",
    ),
    "export": Command(
        "forerun.verbs.export.export:export",
        "write a run as a verified Hugging Face folder",
        "forerun export runs/quickstart --to my-model",
    ),
    "generate": Command(
        "forerun.cli.generate:generate",
        "continue a prompt, or a file of prompts",
        "forerun generate runs/quickstart Once --temperature 0",
    ),
    "chat": Command(
        "forerun.cli.models:chat",
        "chat with a model in the terminal",
        "forerun chat HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "eval": Command(
        "forerun.cli.models:evaluate",
        "measure a model on held-out text or lm-eval tasks",
        "forerun eval runs/quickstart --data held_out.txt",
    ),
    "watch": Command(
        "forerun.cli.reports:watch", "follow a run in the terminal or in a browser", "forerun watch runs/quickstart"
    ),
    "runs": Command("forerun.cli.reports:runs", "list the runs of a folder", "forerun runs --json"),
    "run": Command(
        "forerun.cli.cloud.run:run",
        "rent a slice, train a job on it, and delete the slice",
        "forerun run job.yaml --on v6e-8 --spot --max-usd 40",
    ),
    "ps": Command("forerun.cli.cloud.show_runs:ps", "list the cloud resources that cost money", "forerun ps"),
    "logs": Command(
        "forerun.cli.cloud.show_runs:logs", "follow the log of a cloud run", "forerun logs quickstart --host 2"
    ),
    "stop": Command(
        "forerun.cli.cloud.end_runs:stop",
        "save a checkpoint of a cloud run, and delete its slice",
        "forerun stop quickstart",
    ),
    "down": Command(
        "forerun.cli.cloud.end_runs:down",
        "delete the cloud resources of a run, and keep its results",
        "forerun down quickstart",
    ),
    "fetch": Command(
        "forerun.cli.cloud.show_runs:fetch",
        "download the results of a cloud run",
        "forerun fetch quickstart --to runs/quickstart",
    ),
    "manifest": Command(
        "forerun.cli.cloud.manifest:manifest",
        "write a job for Kubernetes, SkyPilot or Slurm",
        "forerun manifest job.yaml --on v6e-256 --for gke",
    ),
    "doctor": Command("forerun.cli.doctor:doctor", "find problems of this machine", "forerun doctor --smoke"),
    "hardware": Command(
        "forerun.verbs.machine:hardware_table",
        "print the tables of chips, slices and prices",
        "forerun hardware slices",
    ),
    "explain": Command(
        "forerun.cli.job_files:explain", "explain an error code and its fix", "forerun explain E-JOB-018"
    ),
    "schema": Command(
        "forerun.cli.job_files:schema",
        "print the JSON Schema of a job, for editors",
        "forerun schema --output job.schema.json",
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
    parser = make_parser(name, load_function(command.function), command.summary, command.example)
    parser.add_argument("--debug", action="store_true", help=GLOBAL_OPTIONS["--debug"])
    return parser


def help_text() -> str:
    """Return the text of `forerun --help`."""
    lines = [
        "forerun plans and trains language models on TPU, GPU and CPU from one job file.",
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
