"""The vocabulary of a GGUF file, from the tokenizer.json of a folder.

llama.cpp has its own code for splitting text and selects it by name, so a tokenizer has a GGUF form only if llama.cpp
splits text in the same way. Its converter recognizes tokenizers by a hash of sample tokens, which fails for a tokenizer
that the user trained. Here the steps of tokenizer.json select the name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.hub.documents import read_json
from forerun.weights_io.documents import TOKENIZER_CONFIG

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"
ADDED_SCORE = -1000.0
MAX_TOKENIZER_BYTES = 1 << 28
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPECIAL_LOOK = re.compile(r"<\|.*\|>|<unused\d+>|<pad>|<mask>")
_WORDS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_PLAIN = rf"{_SHORT}|{_WORDS}\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}"
_CASED = rf"{_WORDS}{_UPPER}*{_LOWER}+%s|{_WORDS}{_UPPER}+{_LOWER}*%s|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_REST}"
# The regular expression of tokenizer.json and whether it has ignore_merges, and llama.cpp's name.
SPLITS = {
    (_PLAIN % "{1,3}", True): "llama-bpe",
    (_PLAIN % "{1,3}", False): "dbrx",  # also OLMo 2 and Phi-4
    (_PLAIN % "", False): "qwen2",
    (_CASED % ("", "", ""), True): "tekken",
    (_CASED % (f"{_SHORT}?", f"{_SHORT}?", "{1,3}"), False): "gpt-4o",
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model as llama.cpp reads them."""

    model: str  # "gpt2" (byte-level BPE) or "llama" (SentencePiece)
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    special: dict[str, int]  # ids by llama.cpp's names: bos, eos, eot, unknown, padding
    add_bos: bool
    space_prefix: bool | None
    strips_spaces: bool  # special tokens remove the spaces after them, as in Phi-3


def vocabulary_of(folder: Path, size: int, ends: Sequence[int]) -> Vocabulary:
    """Return the vocabulary of an exported folder.

    Args:
        folder: The folder with tokenizer.json and tokenizer_config.json.
        size: The rows of the embedding. Rows without a token become unused tokens.
        ends: The ids that end an answer; the first one ends a turn.

    Raises:
        UserError: llama.cpp has no tokenizer that splits text in the same way.
    """
    import tokenizers

    content = read_json(folder / "tokenizer.json", limit_bytes=MAX_TOKENIZER_BYTES)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = content["model"]
    if model.get("type") != "BPE":
        raise _unsupported(f"its model is {model.get('type')}, and llama.cpp needs BPE")
    steps = _steps(content.get("pre_tokenizer"), "pretokenizers")
    is_bytes = any(step["type"] == "ByteLevel" for step in steps)
    merges = [tuple(one.split(" ", 1)) if isinstance(one, str) else tuple(one) for one in model.get("merges") or ()]
    tokens, types = _tokens(content, inner, size, spelled=not is_bytes)
    special = _special(folder, inner, ends)
    first = inner.encode("a").ids[0]
    if is_bytes:
        pre = _pre_tokenizer(steps, content, bool(merges))
        scores, space_prefix = None, None
    else:
        pre = "default"
        scores, space_prefix = _scores(tokens, types, merges), _has_space_prefix(steps, content)
    return Vocabulary(
        model="gpt2" if is_bytes else "llama",
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores,
        # llama.cpp needs at least one merge. This one never applies, because its parts are never formed.
        merges=([" ".join(map(_without_spaces, pair)) for pair in merges] or ["[PAD] [PAD]"]) if is_bytes else None,
        special=special,
        add_bos=first == special.get("bos"),
        space_prefix=space_prefix,
        strips_spaces=_strips_spaces(content),
    )


def model_name(name: str, vocabulary: Vocabulary) -> str:
    """Return a name for the file with which llama.cpp treats spaces after special tokens as the tokenizer does.

    llama.cpp removes these spaces if the name contains phi3 or phi-3, and then needs the tokens of Phi-3. A GGUF file
    has no key for it.
    """
    has_phi3 = re.search("phi-?3", name, re.IGNORECASE) is not None
    if vocabulary.strips_spaces:
        return name if has_phi3 else f"{name} (phi-3 tokenizer)"
    return re.sub("(phi)-?3", r"\1 3", name, flags=re.IGNORECASE) if has_phi3 else name


def _strips_spaces(content: Mapping[str, Any]) -> bool:
    added = {token["content"]: bool(token.get("rstrip")) for token in content.get("added_tokens") or ()}
    plain = {"<unk>", "<s>", "<|endoftext|>"}
    return plain | {"</s>"} <= set(added) and all(strips for text, strips in added.items() if text not in plain)


def _steps(given: Any, key: str) -> list[dict[str, Any]]:
    """Return the steps of a pre-tokenizer or normalizer as a flat list."""
    if given is None:
        return []
    if given.get("type") == "Sequence":
        return [step for one in given.get(key, ()) for step in _steps(one, key)]
    return [given]


def _pre_tokenizer(steps: list[dict[str, Any]], content: Mapping[str, Any], has_merges: bool) -> str:
    """Return llama.cpp's name for the steps of a byte-level tokenizer."""
    normal = [step["type"] for step in _steps(content.get("normalizer"), "normalizers")]
    if set(normal) - {"NFC"}:  # llama.cpp does not normalize; most text is NFC already
        raise _unsupported(f"its normalizer is {' and '.join(normal)}")
    *before, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        raise _unsupported("it adds a space before the text")
    kinds = [step["type"] for step in before]
    if last.get("use_regex", True):
        if not before:
            return "gpt-2"
        if kinds == ["Digits"] and before[0].get("individual_digits"):
            return "smollm"
    elif not before and not has_merges:
        return "gpt-2"  # without merges, tokens are bytes, wherever the text is split
    elif kinds == ["Split"]:
        split = before[0]
        plain = split.get("behavior") == "Isolated" and not split.get("invert")
        key = (split.get("pattern", {}).get("Regex"), bool(content["model"].get("ignore_merges")))
        if plain and key in SPLITS:
            return SPLITS[key]
    raise _unsupported(f"its pre-tokenizer is {', '.join(kinds) or 'none'}, with other settings")


def _has_space_prefix(steps: list[dict[str, Any]], content: Mapping[str, Any]) -> bool:
    """Return whether a SentencePiece tokenizer puts a space before the text. Raise a UserError for other tokenizers."""
    normal = _steps(content.get("normalizer"), "normalizers")
    kinds = {step["type"] for step in normal}
    if not content["model"].get("byte_fallback") or kinds - {"Prepend", "Replace"}:
        raise _unsupported("it is neither a byte-level tokenizer nor one of SentencePiece")
    for step in steps:
        if step["type"] == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True))
        if step["type"] != "Split":  # Gemma splits at spaces, which it has replaced already
            raise _unsupported(f"its pre-tokenizer is {step['type']}")
    return "Prepend" in kinds


def _tokens(content: Mapping[str, Any], inner: Any, size: int, spelled: bool) -> tuple[list[str], list[int]]:
    """Return the text and the type of each id. `spelled` means that bytes are tokens such as <0x0A>."""
    tokens, types = [f"[PAD{n}]" for n in range(size)], [UNUSED] * size
    unknown = content["model"].get("unk_token")
    for text, number in inner.get_vocab(with_added_tokens=True).items():
        if number >= size:
            raise _unsupported(f"token {number} has no row in the embedding of {size} rows")
        tokens[number], types[number] = text, NORMAL
        if spelled and _BYTE.fullmatch(text):
            types[number] = BYTE
    for added in content.get("added_tokens") or ():
        text, number = added["content"], added["id"]
        is_control = added.get("special") or _SPECIAL_LOOK.fullmatch(text)
        tokens[number] = text if is_control else text.replace(SPACE, " ")
        types[number] = CONTROL if is_control else USER_DEFINED
        if spelled and text == unknown:
            types[number] = UNKNOWN
    return tokens, types


def _scores(tokens: list[str], types: list[int], merges: list[tuple[str, ...]]) -> list[float]:
    """Return the score of each token: llama.cpp merges the pair whose result has the highest score first."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    last = len(merges)
    plain = [-float(ranks.get(token, last)) for token in tokens]
    kept = (NORMAL, BYTE)
    return [score if kind in kept else ADDED_SCORE for score, kind in zip(plain, types, strict=True)]


def _special(folder: Path, inner: Any, ends: Sequence[int]) -> dict[str, int]:
    """Return the ids of special tokens.

    The end of text is `eos`. If turns end with another token, that one is `eot`; llama.cpp stops at both.
    """
    named = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    config = read_json(folder / "config.json")
    found: dict[str, int] = {}
    for key, ours in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        text = named.get(f"{key}_token")
        text = text.get("content") if isinstance(text, dict) else text
        number = inner.token_to_id(text) if isinstance(text, str) else config.get(f"{key}_token_id")
        if isinstance(number, list):
            number = next(iter(number), None)
        if isinstance(number, int) and number >= 0:
            found[ours] = number
    if ends:
        found.setdefault("eos", ends[0])
        if other := [end for end in ends if end != found["eos"]]:
            found["eot"] = other[0]
    return found


def _without_spaces(part: str) -> str:
    return part.replace(" ", "Ġ")


def _unsupported(why: str) -> UserError:
    return UserError(
        "E-WEIGHTS-022",
        "the tokenizer has no GGUF form",
        why=f"{why}; llama.cpp would split text into other tokens",
        fix="export without --gguf, or train with the tokenizer of a supported model",
    )
