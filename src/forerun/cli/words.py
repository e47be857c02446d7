"""The commands of the command line, their options and their help. A test freezes this list."""

from __future__ import annotations

from forerun.cli.options import cloud_options, job_options, machine_options, model_options, run_options
from forerun.cli.options.parser import Command, Parser

VIEWS, CLOUD = "forerun.cli.views", "forerun.cli.cloud"

COMMANDS = {
    "init": Command(
        "write a first job file from a recipe", "forerun init --recipe lora job.yaml", job_options.add_init_options
    ),
    "convert": Command(
        "write a job from a file of axolotl, TRL or transformers",
        "forerun convert axolotl.yml --devices 8",
        job_options.add_convert_options,
    ),
    "check": Command(
        "show every value of a job and its origin", "forerun check job.yaml --on v5e-8", job_options.add_check_options
    ),
    "data": Command(
        "show the data as the model will see it", "forerun data job.yaml --html data.html", job_options.add_data_options
    ),
    "tokenizer": Command(
        "train a tokenizer on text, or show how one splits it",
        "forerun tokenizer train texts.txt --vocab 8192 --to tokenizer/",
        job_options.add_tokenizer_options,
    ),
    "plan": Command(
        "predict memory, time and cost without a TPU or GPU",
        "forerun plan job.yaml --on v6e-1,v5e-8",
        job_options.add_plan_options,
    ),
    "cache": Command(
        "store the logits of a job's teacher", "forerun cache job.yaml distil.top_k=32", job_options.add_cache_options
    ),
    "train": Command(
        "train a job, or resume it",
        "forerun train job.yaml optimizer.lr=8e-5 mesh.fsdp=8",
        job_options.add_train_options,
    ),
    "profile": Command(
        "record a few steps of a job with the JAX profiler",
        "forerun profile job.yaml --steps 5",
        job_options.add_profile_options,
    ),
    "sweep": Command(
        "train all combinations of some values, and compare them",
        "forerun sweep job.yaml optimizer.lr=1e-5,3e-5 seed=0,1",
        job_options.add_sweep_options,
    ),
    "report": Command(
        "show the results and curves of a run",
        "forerun report runs/quickstart --html report.html",
        run_options.add_report_options,
        VIEWS,
    ),
    "compare": Command(
        "compare the results, curves and jobs of runs",
        "forerun compare runs/first runs/second",
        run_options.add_compare_options,
        VIEWS,
    ),
    "export": Command(
        "write a run as a verified Hugging Face folder",
        "forerun export runs/quickstart --to my-model",
        model_options.add_export_options,
    ),
    "generate": Command(
        "continue a prompt, or a file of prompts",
        "forerun generate runs/quickstart Once --temperature 0",
        model_options.add_generate_options,
    ),
    "chat": Command(
        "chat with a model in the terminal",
        "forerun chat HuggingFaceTB/SmolLM2-135M-Instruct",
        model_options.add_chat_options,
    ),
    "eval": Command(
        "measure a model on held-out text or lm-eval tasks",
        "forerun eval runs/quickstart --data held_out.txt",
        model_options.add_eval_options,
    ),
    "watch": Command(
        "follow a run in the terminal or in a browser",
        "forerun watch runs/quickstart",
        machine_options.add_watch_options,
        VIEWS,
    ),
    "runs": Command("list the runs of a folder", "forerun runs --json", machine_options.add_runs_options, VIEWS),
    "run": Command(
        "rent a slice, train a job on it, and delete the slice",
        "forerun run job.yaml --on v6e-8 --spot --max-usd 40",
        cloud_options.add_run_options,
        CLOUD,
    ),
    "ps": Command("list the cloud resources that cost money", "forerun ps", cloud_options.add_ps_options, CLOUD),
    "logs": Command(
        "follow the log of a cloud run", "forerun logs quickstart --host 2", cloud_options.add_logs_options, CLOUD
    ),
    "stop": Command(
        "save a checkpoint of a cloud run, and delete its slice",
        "forerun stop quickstart",
        cloud_options.add_stop_options,
        CLOUD,
    ),
    "down": Command(
        "delete the cloud resources of a run, and keep its results",
        "forerun down quickstart",
        cloud_options.add_down_options,
        CLOUD,
    ),
    "fetch": Command(
        "download the results of a cloud run",
        "forerun fetch quickstart --to runs/quickstart",
        cloud_options.add_fetch_options,
        CLOUD,
    ),
    "manifest": Command(
        "write a job for Kubernetes, SkyPilot or Slurm",
        "forerun manifest job.yaml --on v6e-256 --for gke",
        cloud_options.add_manifest_options,
        CLOUD,
    ),
    "doctor": Command("find problems of this machine", "forerun doctor --smoke", machine_options.add_doctor_options),
    "hardware": Command(
        "print the tables of chips, slices and prices", "forerun hardware slices", machine_options.add_hardware_options
    ),
    "explain": Command(
        "explain an error code and its fix", "forerun explain E-JOB-018", machine_options.add_explain_options
    ),
    "schema": Command(
        "print the JSON Schema of a job, for editors",
        "forerun schema --output job.schema.json",
        machine_options.add_schema_options,
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
