"""Options of commands that use a trained model."""

from __future__ import annotations

import argparse

from forerun.cli.options.job_options import add_stage_option
from forerun.cli.options.values import comma_list, count, step_name


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun export`."""
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
        type=step_name,
        default="newest",
        help="newest, best (lowest validation loss) or a step (default: newest)",
    )
    add_stage_option(parser, "the stage to write (default: the last)")
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
        type=count,
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
    parser.add_argument("--top-k", metavar="K", type=count, help="sample from the K most likely tokens")
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
    parser.add_argument("--devices", metavar="N", type=count, help="number of devices (default: all)")
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


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun generate`."""
    _ask(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue")
    parser.add_argument("--batch", metavar="FILE", help='JSONL file with {"prompt": ...} or {"messages": [...]} lines')
    parser.add_argument(
        "--out", metavar="FILE", help="with --batch: file for the answers; an existing file is continued"
    )
    parser.add_argument(
        "--rows",
        metavar="N",
        type=count,
        default=8,
        help="with --batch: prompts that are answered together (default: 8)",
    )
    _answer(parser, 128)


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun chat`."""
    _ask(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    _answer(parser, 1024)


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun eval`."""
    _ask(parser)
    parser.add_argument(
        "--data", metavar="PATH", help="file or folder with held-out text, for loss, perplexity and bits per byte"
    )
    parser.add_argument(
        "--tasks",
        metavar="TASKS",
        type=comma_list,
        help="tasks of lm-eval: names, YAML files or folders, for example a,b",
    )
    parser.add_argument("--limit", metavar="N", type=count, help="with --tasks: only the first N examples of each task")
    parser.add_argument("--chat", action="store_true", help="with --tasks: use the chat template of the model")
    parser.add_argument(
        "--context", metavar="N", type=count, help="longest input in tokens (default: that of the model)"
    )
    parser.add_argument(
        "--batch", metavar="N", type=count, default=8, help="rows that are computed together (default: 8)"
    )
    parser.add_argument(
        "--device", choices=("auto", "tpu", "gpu", "cpu"), default="auto", help="device to use (default: auto)"
    )
    parser.add_argument("--devices", metavar="N", type=count, help="number of devices (default: all)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of weights and arithmetic (default: bfloat16; on a CPU float32)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
