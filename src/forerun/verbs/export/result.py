"""What an export writes, and what it has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from forerun.hub.upload import Upload

ExportDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ExportForm:
    """The form in which a run is written.

    Attributes:
      dtype: the dtype of all weights. None means that of the base model, or of the run.
      merge: write the complete model of a run with adapters, not only the adapters.
      dense: write weights that were trained as integers as floats.
      only_adapters: write only the adapters, also those of a base of integers.
      step: the checkpoint: newest, best or a step.
      gguf: also write the model as a GGUF file of this type, with a Modelfile for Ollama.
    """

    dtype: ExportDtype | None = None
    merge: bool = False
    dense: bool = False
    only_adapters: bool = False
    step: str | int = "newest"
    gguf: str | None = None


@dataclass(frozen=True)
class GgufExport:
    """A GGUF file in the folder of an export.

    Attributes:
      path: the file.
      proof: a sentence about the comparison of the file with the folder.
      notes: differences between llama.cpp and the trained model that the user must know.
    """

    path: Path
    proof: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Export:
    """The folder of an export, and the result of its comparison. Printing it shows how to load the model.

    Attributes:
      folder: the folder that was written.
      proof: a sentence about the comparison, or "" for a folder that existed.
      is_adapter: whether the folder has adapters for a base model, which PEFT loads.
      inside: the folder of the adapters in that of a base of integers, or None.
      gguf: the GGUF file, or None.
      upload: the address of the upload, or None.
      step: the step of the checkpoint, or None for a folder that existed.
      is_custom: whether the model is a custom class, which transformers cannot load.
    """

    folder: Path
    proof: str
    is_adapter: bool = False
    inside: Path | None = None
    gguf: GgufExport | None = None
    upload: Upload | None = None
    step: int | None = None
    is_custom: bool = False

    @property
    def format_name(self) -> str:
        """The format of the folder, as the report of a run shows it."""
        name = "PEFT adapter" if self.is_adapter else "forerun" if self.is_custom else "Hugging Face"
        return f"{name} and GGUF" if self.gguf is not None else name

    def __str__(self) -> str:
        lines = [f"done: {self.folder}"]
        if self.proof:
            lines.append(f"      {self.proof}")
        if self.gguf is not None:
            lines.append(f"      {self.gguf.path.name}: {self.gguf.proof}")
            lines += [f"      note: {note}" for note in self.gguf.notes]
        if self.upload is not None:
            lines.append(f"      uploaded ({'private' if self.upload.is_private else 'public'}): {self.upload.url}")
        if self.proof or self.upload is None:
            lines += [f"      {line}" for line in self._usage()]
        return "\n".join(lines)

    def _usage(self) -> list[str]:
        """Return lines about the libraries that load the model."""
        from forerun.weights_io.serving import checklist, serve_command

        if self.is_custom:
            return [f"forerun generate {self.folder} PROMPT --code FOLDER, with the folder of the class's module"]
        if self.is_adapter:
            return [
                f"peft: PeftModel.from_pretrained(base, {str(self.folder)!r}); the whole model: --merge",
                f"vLLM: {serve_command(self.folder)}",
            ]
        load = f"AutoModelForCausalLM.from_pretrained({str(self.folder)!r}"
        if self.inside is None:
            lines = [f"transformers: {load})"]
        else:
            lines = [
                f"transformers: base = {load}, quantization_config=CompressedTensorsConfig(dequantize=True))",
                f"peft: PeftModel.from_pretrained(base, {str(self.inside)!r}); base alone is without the adapters",
            ]
        faults = [f"; {name}: {fault}" for name, fault in checklist(self.folder) if fault is not None]
        return [*lines, f"vLLM: {serve_command(self.folder)}{''.join(faults)}"]
