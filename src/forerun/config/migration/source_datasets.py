"""The `datasets` of axolotl and TRL as sources of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forerun.config.migration.conversion import Conversion, ForeignValues, accepts, unsupported, whole_in
from forerun.config.migration.values import hub_address
from forerun.storage.address import Address

_BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # in place of a hub name, with the files in data_files
_CHAT = ("chat_template", "chat_template.default", "chat_template.argilla", "sharegpt", "bradley_terry.chat_template")
_TEXT = ("completion", "pretrain")
_ROLES = ("role", "from")
_CONTENTS = ("content", "value")
# Keys of an entry that forerun does not need: it finds the form of the rows and the kind of the file.
_UNNEEDED = {"ds_type", "roles", "roles_to_train", "train_on_eos", "train_on_eot", "trust_remote_code", "streaming",
             "conversation", "revision", "drop_system_message", "message_field_training"}  # fmt: skip
_READ = {"path", "type", "field", "field_messages", "field_chosen", "field_rejected", "message_property_mappings",
         "message_field_role", "message_field_content", "split", "name", "data_files", "data_dir", "fraction", "weight",
         "columns", "chat_template"}  # fmt: skip


def converted_datasets(value: Any, given: ForeignValues) -> Conversion:
    """Convert one dataset to `data.path`, and several to `data.mixture`."""
    entries = value if isinstance(value, list) else [value]
    entries = [{"path": entry} if isinstance(entry, str) else entry for entry in entries]
    if not entries or not all(isinstance(entry, dict) and isinstance(entry.get("path"), str) for entry in entries):
        return unsupported("each dataset needs a path")
    sources = [_Source(entry, given) for entry in entries]
    lost = "; ".join(reason for source in sources for reason in source.lost)
    settings: dict[str, Any] = {}
    names: list[str] = []
    for source in sources:
        prefix = "data."
        if len(sources) > 1:
            prefix = f"data.mixture.{_unique(source.path, names)}."
        settings.update({f"{prefix}{key}": one for key, one in source.settings.items()})
    note = "; ".join(dict.fromkeys(source.note for source in sources if source.note))
    return Conversion(settings, note, lost=lost)


class _Source:
    """One dataset: its settings, the parts that cannot be converted, and a note."""

    def __init__(self, entry: Mapping[str, Any], given: ForeignValues) -> None:
        self._entry, self._given = entry, given
        self.lost: list[str] = []
        self.note = ""
        self.path = self._path()
        self.settings: dict[str, Any] = {"path": self.path}
        weight = entry.get("fraction") or entry.get("weight")
        if weight is not None:
            self.settings["weight"] = weight
        self._read_columns()
        self._read_split()
        unknown = [str(key) for key in entry if key not in _READ | _UNNEEDED and entry[key] is not None]
        if unknown:
            self._lose(f"no counterpart for {', '.join(unknown)}")

    def _lose(self, reason: str) -> None:
        self.lost.append(f"{self._entry['path']}: {reason}")

    def _path(self) -> str:
        path, files = str(self._entry["path"]), self._entry.get("data_files")
        files = files if isinstance(files, list) else [files] if files else []
        folder = str(self._entry.get("data_dir") or "")
        if path in _BUILDERS and files:
            if len(files) > 1:
                self._lose(f"only the first of {len(files)} data_files; write a glob or a mixture")
            return str(files[0])
        address = hub_address(path)
        if self._entry.get("name") not in (None, "default") and not files and not folder:
            self._lose(
                f"configuration '{self._entry['name']}': add its files to the address, as in hf://datasets/a/b/*.parquet"
            )
        if len(files) == 1 and isinstance(files[0], str) and Address.of(address).protocol == "hf":
            return f"{address}/{files[0]}"
        if files:
            self._lose("data_files: write a file or a glob into data.path")
        return f"{address}/{folder}" if folder else address

    def _read_columns(self) -> None:
        entry, kind = self._entry, self._entry.get("type")
        columns: dict[str, str] = {}
        if isinstance(kind, dict):
            self._lose("a custom type: map its columns with data.columns")
        elif kind in _TEXT or (kind is None and entry.get("field")):
            columns["text"] = str(entry.get("field") or "text")
        elif kind in _CHAT:
            columns.update(self._chat_columns())
        elif kind is not None and str(kind).partition(":")[0] == "alpaca":
            self.note = "rows of instruction, input and output: see `forerun data`"
            if ":" in str(kind):
                self._lose(f"the prompt of '{kind}'; the chat template of the model is used")
        elif kind is not None:
            self._lose(f"type '{kind}': check its rows with `forerun data`")
        columns = {role: name for role, name in columns.items() if role != name}
        if columns:
            self.settings.update({f"columns.{role}": name for role, name in columns.items()})
        if isinstance(entry.get("columns"), list):
            self._lose("columns: all columns are read; data.columns gives them other names")

    def _chat_columns(self) -> dict[str, str]:
        entry = self._entry
        mapping = entry.get("message_property_mappings") or {}
        role = mapping.get("role") or entry.get("message_field_role") or "role"
        content = mapping.get("content") or entry.get("message_field_content") or "content"
        if role not in _ROLES or content not in _CONTENTS:
            self._lose(f"messages with '{role}' and '{content}'; forerun reads role and content, or from and value")
        extra = [name for name in mapping if name not in ("role", "content")]
        if extra:
            self._lose(f"{', '.join(extra)} of messages")
        if entry.get("field_chosen") or self._given.first("rl") is not None:
            found = {"chosen": str(entry.get("field_chosen") or "chosen"),
                     "rejected": str(entry.get("field_rejected") or "rejected")}  # fmt: skip
            return found | ({"prompt": str(entry["field_messages"])} if entry.get("field_messages") else {})
        return {"messages": str(entry.get("field_messages") or "messages")}

    def _read_split(self) -> None:
        split = str(self._entry.get("split") or "train")
        name, _, part = split.partition("[")
        if name != "train":
            self._lose(f"split '{name}': name its files in the address")
        if not part:
            return
        limit = whole_in(part.removeprefix(":").removesuffix("]"))
        if limit and part.startswith(":") and accepts({"data.limit": limit}):
            self.settings["limit"] = limit
        else:
            self._lose(f"split '{split}': all rows are read")


def _unique(path: str, names: list[str]) -> str:
    """Return a name for a source that is not in `names`, and add it."""
    base = re.sub(r"[^A-Za-z0-9_-]+", "-", path.rstrip("/").rpartition("/")[2]).strip("-") or "data"
    name = next(f"{base}-{number}" if number > 1 else base for number in range(1, len(names) + 2)
                if (f"{base}-{number}" if number > 1 else base) not in names)  # fmt: skip
    names.append(name)
    return name
