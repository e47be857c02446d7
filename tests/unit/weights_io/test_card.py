"""Model cards of hostile names: markdown-it and PyYAML, the parsers of the readers, decide what a card contains."""

from __future__ import annotations

from typing import Any

import markdown_it
import yaml

from forerun.weights_io.card import ModelCard, card

SUMMARY = {"steps": 2, "tokens": 64, "parameters": 1000, "device": {"count": 1, "kind": "cpu"}, "mesh": "fsdp=1"}


def parsed(**changes: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the header of a card and the tokens of its Markdown."""
    values: dict[str, Any] = {
        "name": "tiny",
        "base": None,
        "revision": None,
        "job": "name: tiny\n",
        "data": ["chat.jsonl"],
        "sequence": 64,
        "summary": SUMMARY,
        "losses": [(1, 2.0)],
        "cost": "$1.00",
        "proof": "equal",
    }
    _, header, body = card(ModelCard(**{**values, **changes})).split("---\n", 2)
    return yaml.safe_load(header), markdown_it.MarkdownIt().enable("table").parse(body)


def headings(tokens: list[Any]) -> list[str]:
    return [tokens[n + 1].content for n, token in enumerate(tokens) if token.type == "heading_open"]


def test_only_a_hub_name_becomes_the_base_of_the_header() -> None:
    hub, _ = parsed(base="owner/model-1")
    folder, tokens = parsed(base="owner/model\ntags: [stolen]\n---\n# Forged")
    assert hub == {"library_name": "transformers", "base_model": "owner/model-1"}
    assert folder == {"library_name": "transformers"}
    assert headings(tokens) == ["tiny", "Data", "Proof", "Job"]


def test_a_job_cannot_end_its_code_block() -> None:
    job = "name: tiny\nsample:\n  prompts:\n  - |\n    ```\n    # Forged\n    ~~~~\n"
    _, tokens = parsed(job=f"{job}x: '````'\n```\n# Forged\n")
    (block,) = [token for token in tokens if token.type == "fence"]
    assert block.content == f"{job}x: '````'\n```\n# Forged\n"
    assert headings(tokens) == ["tiny", "Data", "Proof", "Job"]


def test_names_stay_in_their_place() -> None:
    hostile = "`x` | y\n\n# Forged\n<script>alert(1)</script> [link](http://127.0.0.1)"
    summary = {**SUMMARY, "mesh": hostile, "device": {"count": 1, "kind": hostile}, "program": hostile}
    _, tokens = parsed(base=hostile, revision=hostile, data=[hostile], summary=summary, cost=hostile)
    assert headings(tokens) == ["tiny", "Data", "Proof", "Job"]
    children = [child for token in tokens for child in token.children or ()]
    assert {child.type for child in children} <= {"text", "code_inline", "softbreak", "image", "text_special"}
    assert not [token for token in tokens if token.type.startswith("html")]
    rows = [token for token in tokens if token.type == "tr_open"]
    cells = [token for token in tokens if token.type in ("td_open", "th_open")]
    assert len(cells) == 2 * len(rows)
    code = [child.content for child in children if child.type == "code_inline"]
    assert code == [" ".join(hostile.split())] * 3
