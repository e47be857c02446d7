"""Write pairs.jsonl: requests with the answer of a helpful neighbour (chosen) and of an unhelpful one (rejected)."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

THINGS = ("ladder", "kettle", "lamp", "saw", "rope", "bucket", "tent", "drum", "chair", "map", "spade", "whistle")
ASKED = ("May I borrow your {}?", "Could you lend me a {} today?", "I need a {}. Have you got one?")
CHOSEN = ("Of course, the {} is yours as long as you like.", "Gladly! I will bring the {} over.", "Yes, take the {}.")
REJECTED = ("No. Buy a {}.", "Why should I give you my {}? Go away.", "The {} stays here, and so do I.")


def main() -> None:
    forms = list(itertools.product(THINGS, ASKED, CHOSEN, REJECTED))
    random.Random(7).shuffle(forms)
    rows = [
        {"prompt": asked.format(thing), "chosen": f" {yes.format(thing)}", "rejected": f" {no.format(thing)}"}
        for thing, asked, yes, no in forms[:240]
    ]
    file = Path(__file__).parent / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
