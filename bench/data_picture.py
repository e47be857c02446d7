"""Draw docs/assets/data-view.png and data-view.svg: output of `forerun data` for real chats, as page and in a terminal.

    pip install chitchat-dataset        # MIT, 7,168 dialogues
    python bench/data_picture.py path/of/SmolLM2-135M-Instruct/tokenizer.json    # needs chromium, some seconds

`--html FILE` keeps the page, `--dark` and `--width 400` change its appearance, `--text` prints the terminal's view.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from itertools import islice
from pathlib import Path

from plan_picture import THEME, without_blanks, without_links
from rich.console import Console

from forerun.config.load import load
from forerun.data.inspect.corpus_report import CorpusReport
from forerun.data.inspect.open_corpus import report_of
from forerun.data.inspect.page import page
from forerun.data.inspect.terminal import print_report
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model

ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"
DIALOGUES = 2000
JOB = """
name: chitchat
model: {{layers: 2, embed: 64, heads: 2, vocab: 49152}}
data: {{path: {folder}/chitchat.jsonl, tokenizer: {tokenizer}, chat_template: chatml, store: {folder}/store}}
sequence: 2048
batch: 16
steps: 100
"""
SYSTEM = "You are a friendly chat partner."
WIDTH, HEIGHT = 1200, 1750
COLUMNS = 96


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--png", type=Path, default=ASSETS / "data-view.png")
    parser.add_argument("--svg", type=Path, default=ASSETS / "data-view.svg")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--height", type=int, default=HEIGHT)
    parser.add_argument("--text", action="store_true", help="print the terminal's view, and make no picture")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        look = chat_look(args.tokenizer, Path(folder))
        if args.text:
            print_report(Console(highlight=False), look)
            return 0
        file = args.html or Path(folder) / "data.html"
        file.write_text(page(look), encoding="utf-8")
        photograph(file, args.png, args.width, args.height, args.dark)
    args.svg.write_text(terminal_picture(look), encoding="utf-8")
    return 0


def chat_look(tokenizer: Path, folder: Path) -> CorpusReport:
    """Return the view of the data that `forerun data` computes."""
    lines = (json.dumps({"messages": messages}, ensure_ascii=False) for messages in conversations())
    (folder / "chitchat.jsonl").write_text("\n".join(lines), encoding="utf-8")
    job = folder / "chitchat.yaml"
    job.write_text(JOB.format(folder=folder, tokenizer=tokenizer.resolve()), encoding="utf-8")
    loaded = load(job, ()).job
    return report_of(loaded, open_corpus(resolve_model(loaded)))


def conversations() -> list[list[dict[str, str]]]:
    """Return dialogues as messages. The first speaker is the user."""
    raw = json.loads(resources.files("chitchat_dataset").joinpath("dataset.json").read_text("utf-8"))
    found = []
    for dialogue in islice(raw.values(), DIALOGUES):
        turns = ["\n".join(said["text"] for said in turn) for turn in dialogue["messages"]]
        if len(turns) > 1:
            parts = [
                {"role": ("user", "assistant")[n % 2], "content": text}
                for n, text in enumerate(turns[: len(turns) // 2 * 2])
            ]
            found.append([{"role": "system", "content": SYSTEM}, *parts])
    return found


def photograph(file: Path, picture: Path, width: int, height: int, dark: bool) -> None:
    browser = next(found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name)))
    with tempfile.TemporaryDirectory() as profile:
        scheme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
        command = [
            browser,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"),
            *(*scheme, f"--window-size={width},{height}", f"--screenshot={picture.resolve()}", file.resolve().as_uri()),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def terminal_picture(look: CorpusReport) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print("[green]$[/] [bold]forerun data chitchat.yaml[/]\n", highlight=False)
    print_report(console, look)
    svg = console.export_svg(title="forerun data", theme=THEME, unique_id="data", font_aspect_ratio=0.6)
    return without_links(without_blanks(svg))


if __name__ == "__main__":
    sys.exit(main())
