"""What stands beside the weights in a Hugging Face folder: config.json, generation config, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.hub.chat import TEMPLATE_NAME
from forerun.hub.documents import read_json
from forerun.hub.files import opened
from forerun.hub.snapshot import Snapshot
from forerun.models.families.base import Config, Family

BYTE_END = "<|endoftext|>"
TOKENIZER_CONFIG = "tokenizer_config.json"
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def config_json(family: Family, config: Config, base: Mapping[str, Any] | None, dtype: str, end: int) -> dict[str, Any]:
    """A checkpoint's own config.json, or one made from the dimensions. `dtype` is that of most weights."""
    if base is None:
        if family.write is None:
            raise UserError(
                f"a {family.model_type} model is exported from a checkpoint only",
                why="forerun does not write its config.json from dimensions",
                fix="start the run from a checkpoint of that family",
            )
        ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
        base = {"architectures": [family.architecture], "model_type": family.model_type} | family.write(config) | ids
    named = {"dtype", "torch_dtype"} & set(base) or {"dtype"}  # transformers 5 and 4
    return {**base, **dict.fromkeys(sorted(named), TORCH_NAMES[dtype])}


def generation_json(base: Mapping[str, Any] | None, end: int) -> dict[str, Any]:
    return dict(base) if base is not None else {"eos_token_id": end}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    atomic_write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def copy_tokenizer(snapshot: Snapshot, folder: Path) -> None:
    """Tokenizer files and chat template, byte for byte."""
    for path in snapshot.tokenizer_files:
        # A link must not bring a file of the user's into a folder that is published.
        with (
            opened(path) as descriptor,
            open(descriptor, "rb", closefd=False) as file,
            open(folder / path.name, "wb") as copy,
        ):
            shutil.copyfileobj(file, copy)


def write_tokenizer(path: Path | None, folder: Path, end: int) -> None:
    """Write a tokenizer.json of the user's own, or the 257 ids of plain bytes as one; `end` ends a document."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(path)) if path else byte_tokenizer()
    inner.save(str(folder / "tokenizer.json"))
    named = {"eos_token": inner.id_to_token(end)}
    write_json(
        folder / TOKENIZER_CONFIG,
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named},
    )


def write_chat_template(folder: Path, template: str, special: Mapping[str, str], end: str | None) -> None:
    """Write the chat template as transformers reads it, next to the tokenizer files in `folder`.

    Newer versions read chat_template.jinja, older ones tokenizer_config.json. Both get `end` as eos_token, unless it
    is None; `special` are texts of special tokens that the template uses and the files may lack.
    """
    atomic_write(folder / TEMPLATE_NAME, template)
    (folder / "chat_template.json").unlink(missing_ok=True)  # an older place of the base's template
    config = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    named = config.get("chat_template")
    if isinstance(named, list):  # the base has several: the others stay
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
    """Ids 0 to 255 are the bytes, 256 ends a document. The library writes bytes as printable characters."""
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
