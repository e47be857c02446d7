"""Write the table of docs/families.md from the records of the family tests.

FORERUN_TABLES=tables pytest -m torch tests && python bench/families_table.py tables
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
START = "<!-- families: written by bench/families_table.py from a run of the tests -->"
END = "<!-- end of families -->"
ROWS = (
    "Llama 2, 3.x", "SmolLM2", "SmolLM3", "Qwen2, 2.5", "Qwen3", "Mistral",
    "Gemma 2", "Gemma 3 (text)", "Phi-3, Phi-4-mini", "OLMo 2",
    "Qwen3.5, 3.6, 3.8 (dense)", "LFM2, LFM2.5", "GPT-2",
)  # fmt: skip
FIRST = (
    "logits",
    "gradients",
    "round trip",
    "greedy",
    "head",
    "RoPE scaling",
)  # then other columns, and "refused" last


def collected(folder: Path) -> dict[str, dict[str, Any]]:
    """Return row -> column -> value. Numbers are merged by maximum, lists by union, and booleans by "and"."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("families-*.jsonl")):
        for line in file.read_text().splitlines():
            noted = json.loads(line)
            row = found.setdefault(noted["row"], {})
            row[noted["column"]] = merged(row.get(noted["column"]), noted["value"])
    return found


def merged(before: Any, value: Any) -> Any:
    if before is None:
        return value
    if isinstance(value, bool):
        return before and value
    if isinstance(value, list):
        return [*before, *(one for one in value if one not in before)]
    return max(before, value)


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def table(found: dict[str, dict[str, Any]]) -> str:
    if unknown := set(found) - set(ROWS):
        raise SystemExit(f"rows that the table does not have: {', '.join(sorted(unknown))}")
    columns = {column for row in found.values() for column in row}
    order = [name for name in FIRST if name in columns]
    order += sorted(columns - set(order) - {"refused"}) + ["refused"] * ("refused" in columns)
    lines = [["family", *order], ["---"] * (len(order) + 1)]
    lines += [[row, *(shown(found.get(row, {}).get(column)) for column in order)] for row in ROWS]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(folder: str) -> None:
    found = collected(Path(folder))
    if not found:
        raise SystemExit(f"{folder} has no families-*.jsonl: run the tests with FORERUN_TABLES={folder} first")
    page = PAGE.read_text()
    before, rest = page.split(START)
    PAGE.write_text(f"{before}{START}\n\n{table(found)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
