"""Share of padding for real dialogues: one row per dialogue, concatenated, or packed as complete documents.

    pip download --no-deps -d FOLDER chitchat-dataset
    python bench/padding.py FOLDER/chitchat_dataset-*.whl path/to/tokenizer.json     # about 20 s

The data are the dialogues of PyPI's chitchat-dataset (MIT) as ChatML. Prints a table and writes
bench/results/padding.json.
"""

from __future__ import annotations

import argparse
import json
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from forerun.data.documents import InMemory
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.whole_documents import WholeDocuments

RESULTS = Path(__file__).parent / "results/padding.json"


def dialogues(wheel: Path) -> list[str]:
    """Return each dialogue as ChatML. The first speaker is the user."""
    with zipfile.ZipFile(wheel) as archive:
        told = json.loads(archive.read("chitchat_dataset/dataset.json"))
    texts = []
    for dialogue in told.values():
        turns = [" ".join(line["text"] for line in turn) for turn in dialogue["messages"]]
        roles = ("user", "assistant")
        chat = (f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns))
        texts.append("".join(chat))
    return [text for text in texts if text]


def tokenized(texts: list[str], file: Path) -> InMemory:
    encoded = Tokenizer.from_file(str(file)).encode_batch_fast(texts, add_special_tokens=False)
    arrays = [np.array(one.ids, np.int32) for one in encoded]
    return InMemory(np.concatenate(arrays), np.concatenate([[0], np.cumsum([len(ids) for ids in arrays])]))


def measured(documents: InMemory, sequence: int) -> dict[str, Any]:
    """Return the number of rows and the share of positions with a token, for each of the three ways."""
    positions = np.maximum(np.diff(documents.offsets) - 1, 0)
    alone = int((-(-positions // sequence)).sum())
    stream = Concatenated(documents, sequence)
    began = time.perf_counter()
    whole = WholeDocuments(documents, sequence)
    seconds = time.perf_counter() - began
    taken = whole.take(np.arange(len(whole)))
    assert (taken["segments"] > 0).sum() == whole.report.positions == positions.sum()
    crossing = (documents.offsets[:-1] // sequence) != ((documents.offsets[1:] - 1) // sequence)
    return {
        "separate": {"rows": alone, "real_share": float(positions.sum() / (alone * sequence))},
        "concatenate": {
            "rows": len(stream),
            "real_share": 1 - stream.report.padding_share,
            "documents_cut": int(crossing.sum()),
        },
        "whole": {
            "rows": len(whole),
            "real_share": 1 - whole.report.padding_share,
            "documents_cut": whole.report.too_long,
            "window": whole.window,
            "plan_seconds": round(seconds, 3),
        },
    }


def main(wheel: Path, tokenizer: Path) -> None:
    documents = tokenized(dialogues(wheel), tokenizer)
    lengths = np.diff(documents.offsets)
    said: dict[str, Any] = {
        "documents": len(documents),
        "tokens": documents.tokens,
        "median_tokens": float(np.median(lengths)),
        "longest_tokens": int(lengths.max()),
        "sequences": {str(sequence): measured(documents, sequence) for sequence in (512, 1024, 2048)},
    }
    print(f"{said['documents']} dialogues, {said['tokens']} tokens, median {said['median_tokens']:g}\n")
    print("| sequence | a row each | concatenate (cut) | whole (cut) | rows: each, concatenate, whole |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for sequence, one in said["sequences"].items():
        a, b, c = one["separate"], one["concatenate"], one["whole"]
        print(
            f"| {sequence} | {a['real_share']:.1%} | {b['real_share']:.2%} ({b['documents_cut']}) "
            f"| {c['real_share']:.2%} ({c['documents_cut']}) | {a['rows']}, {b['rows']}, {c['rows']} |"
        )
    RESULTS.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="padding of the three ways to make rows")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("tokenizer", type=Path)
    given = parser.parse_args()
    main(given.wheel, given.tokenizer)
