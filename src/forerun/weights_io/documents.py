"""The files beside the weights in a Hugging Face folder: config.json, generation config, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.hub.chat.template import TEMPLATE_NAME
from forerun.hub.documents import read_json
from forerun.hub.files import opened
from forerun.models.families.base import Config, Family
from forerun.models.families.wrapper import TEXT, wrapper_of

BYTE_END = "<|endoftext|>"
TOKENIZER_CONFIG = "tokenizer_config.json"
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def config_json(family: Family, config: Config, base: Mapping[str, Any] | None, dtype: str, end: int) -> dict[str, Any]:
    """Return the config.json of an export.

    Args:
        family: The Hugging Face family of the model.
        config: The dimensions of the model.
        base: The config.json of the checkpoint that the run started from, or None without one.
        dtype: The safetensors dtype of most weights.
        end: The id of the end token, for a model without a base.

    Raises:
        UserError: The run has no base, and the family cannot write a config.json from dimensions.
    """
    if base is None:
        if family.write is None:
            raise UserError(
                "E-WEIGHTS-002",
                f"a {family.model_type} model can be exported only if the run started from a checkpoint",
                why="forerun cannot write its config.json from dimensions",
                fix="start the run from a checkpoint of that family",
            )
        ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
        base = {"architectures": [family.architecture], "model_type": family.model_type} | family.write(config) | ids
    content = _with_dtype(base, TORCH_NAMES[dtype], {"dtype"})
    return content if family.wrapper is None else {**content, TEXT: _with_dtype(base[TEXT], TORCH_NAMES[dtype], set())}


def _with_dtype(section: Mapping[str, Any], dtype: str, otherwise: set[str]) -> dict[str, Any]:
    named = {"dtype", "torch_dtype"} & set(section) or otherwise  # transformers 5 and 4
    return {**section, **dict.fromkeys(sorted(named), dtype)}


def set_text_value(content: dict[str, Any], key: str, value: Any) -> None:
    """Change a value of the text model in a config.json. A multimodal one may also have the key in its top level."""
    if wrapper_of(content) is None:
        content[key] = value
        return
    content[TEXT] = {**content[TEXT], key: value}
    if key in content:
        content[key] = value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    atomic_write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def copy_files(paths: Iterable[Path], folder: Path) -> None:
    """Copy files of a checkpoint unchanged, such as its tokenizer or the settings for its images."""
    for path in paths:
        # `opened` rejects links that lead outside the checkpoint. They could copy a private file into an export that
        # the user publishes.
        with (
            opened(path) as descriptor,
            open(descriptor, "rb", closefd=False) as file,
            open(folder / path.name, "wb") as copy,
        ):
            shutil.copyfileobj(file, copy)


def replace_tokenizer(path: Path, folder: Path) -> None:
    """Replace the tokenizer.json in `folder` by the file at `path`, which has more tokens.

    Files with the vocabulary of a slow tokenizer are removed, because they lack the new tokens.
    """
    shutil.copyfile(path, folder / "tokenizer.json")
    for name in ("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json"):
        (folder / name).unlink(missing_ok=True)


def complete_tokenizer(folder: Path, end: int) -> None:
    """Add the class and the end token to tokenizer_config.json, if the files in `folder` do not name them."""
    import tokenizers

    file = folder / TOKENIZER_CONFIG
    config = read_json(file) if file.exists() else {}
    if "eos_token" in config and "tokenizer_class" in config:
        return
    text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(end)
    write_json(file, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": text, **config})


def write_tokenizer(path: Path | None, folder: Path, end: int) -> None:
    """Write the tokenizer.json at `path`, or the byte tokenizer if it is None. `end` is the id of the end token."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(path)) if path else byte_tokenizer()
    inner.save(str(folder / "tokenizer.json"))
    named = {"eos_token": inner.id_to_token(end)}
    write_json(
        folder / TOKENIZER_CONFIG,
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named},
    )


def write_chat_template(folder: Path, template: str, special: Mapping[str, str], end: str | None) -> None:
    """Write a chat template in the forms that transformers reads, next to the tokenizer files in `folder`.

    Newer versions read chat_template.jinja, older ones tokenizer_config.json.

    Args:
        folder: The folder of the export.
        template: The source of the template.
        special: Texts of special tokens that the template uses. They are added if the files lack them.
        end: The new eos_token, or None to keep the one in the files.
    """
    atomic_write(folder / TEMPLATE_NAME, template)
    (folder / "chat_template.json").unlink(missing_ok=True)  # an older location of the template of the base
    config = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    named = config.get("chat_template")
    if isinstance(named, list):  # the base has several templates: keep the others
        others = [entry for entry in named if isinstance(entry, dict) and entry.get("name") != "default"]
        config["chat_template"] = [{"name": "default", "template": template}, *others]
    else:
        config["chat_template"] = template
    config = {**special, **config} | ({} if end is None else {"eos_token": end})
    write_json(folder / TOKENIZER_CONFIG, config)
    names = folder / "special_tokens_map.json"
    if end is not None and names.exists():
        write_json(names, {**read_json(names), "eos_token": end})


def byte_tokenizer() -> Any:
    """Return the byte tokenizer: ids 0 to 255 are the bytes, and 256 is the end token.

    The library `tokenizers` represents each byte by a printable character.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in characters)}
    inner = tokenizers.Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(BYTE_END, special=True)])
    return inner
