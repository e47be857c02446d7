"""Write the table of docs/reference/families.md from the records of the family tests.

FORERUN_TABLES=tables pytest -m torch tests && python bench/families_table.py tables

The column of methods comes from bench/results/family_methods.json. Without a folder, only this column is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "families.md"
START = "<!-- families: written by bench/families_table.py from a run of the tests -->"
END = "<!-- end of families -->"
RESULTS = Path(__file__).resolve().parent / "results" / "family_methods.json"
ROWS = (
    "Llama 2, 3.x", "SmolLM2", "SmolLM3", "Qwen2, 2.5", "Qwen3", "Mistral",
    "Gemma 2", "Gemma 3 (text)", "VaultGemma", "Gemma 4 12B (text)", "Gemma 4 26B-A4B (text)", "Gemma 4 31B (text)",
    "Gemma 4 E2B, E4B (text)",
    "Phi-3, Phi-4-mini", "OLMo 2", "OLMo 3", "EXAONE 4", "Seed-OSS", "CWM",
    "Ministral 3", "Granite 3, 4.1", "Granite 4.0 without Mamba", "GLM-4", "ERNIE 4.5",
    "Qwen3.5, 3.6, 3.8 (dense)", "Qwen3.5, 3.6 (experts)", "LFM2, LFM2.5", "Qwen3-MoE", "Mixtral", "OLMoE",
    "MiniMax-M2", "gpt-oss",
    "GPT-2",
)  # fmt: skip
METHODS = "20 steps of"
FIRST = (
    "logits",
    "gradients",
    "round trip",
    "greedy",
    "head",
    "RoPE scaling",
    METHODS,
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


def methods(results: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Return row -> the methods that ran 20 steps and whose export was loaded, or the code of the rejection."""
    return {
        row: [
            f"{name.upper().replace('LORA', 'LoRA')}{_rejection(result)}"
            for name, result in found.items()
            if "failed" not in result
        ]
        for row, found in results.items()
    }


def _rejection(result: dict[str, Any]) -> str:
    return f" (rejected: {result['rejected']})" if "rejected" in result else ""


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


def cells(text: str) -> dict[str, dict[str, Any]]:
    """Return row -> column -> text of a table that `table` wrote. Empty cells are left out."""
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()]
    return {
        row[0]: {column: cell for column, cell in zip(head[1:], row[1:], strict=True) if cell} for row in rows if row
    }


def main(folder: str | None = None) -> None:
    page = PAGE.read_text()
    before, rest = page.split(START)
    written, after = rest.split(END)
    measured = {} if folder is None else collected(Path(folder))
    found = cells(written) | measured  # rows of families that were not measured stay as they are
    if folder is not None and not measured:
        raise SystemExit(f"{folder} has no families-*.jsonl: run the tests with FORERUN_TABLES={folder} first")
    for row, names in methods(json.loads(RESULTS.read_text())).items():
        found.setdefault(row, {})[METHODS] = names
    PAGE.write_text(f"{before}{START}\n\n{table(found)}\n\n{END}{after}")


if __name__ == "__main__":
    main(*sys.argv[1:])
