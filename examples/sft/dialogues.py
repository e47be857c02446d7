"""Write dialogues.jsonl: conversations in which the assistant finishes sentences of the quickstart's novels."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOVELS = HERE.parent / "quickstart" / "text"
CONVERSATIONS = 1200


def sentences() -> list[list[str]]:
    """Return sentences of 8 to 20 words as lists of words, in the order of the books."""
    text = " ".join(path.read_text() for path in sorted(NOVELS.glob("*.txt")))
    found = re.findall(r"[A-Z][a-z][^.!?\[\]_\"*]{30,110}[.!?]", " ".join(text.split()))
    return [words for words in map(str.split, found) if 8 <= len(words) <= 20]


def conversation(turns: list[list[str]]) -> dict[str, list[dict[str, str]]]:
    messages = [{"role": "system", "content": "Finish the sentence."}]
    for words in turns:
        half = len(words) // 2
        messages.append({"role": "user", "content": " ".join(words[:half])})
        messages.append({"role": "assistant", "content": " ".join(words[half:])})
    return {"messages": messages}


def main() -> None:
    known = sentences()
    chance = random.Random(0)
    chance.shuffle(known)
    with (HERE / "dialogues.jsonl").open("w") as out:
        for _ in range(CONVERSATIONS):
            turns = [known.pop() for _ in range(chance.choice((1, 1, 2)))]
            out.write(json.dumps(conversation(turns)) + "\n")


if __name__ == "__main__":
    main()
