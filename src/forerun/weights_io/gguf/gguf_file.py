"""Writing of a GGUF file from an exported folder, and the comparison of the written file with the folder."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.hub.chat.template import chat_template
from forerun.hub.snapshot import Snapshot
from forerun.installation import install_command
from forerun.models.families.wrapper import text_of
from forerun.models.model_facts import model_for, read_snapshot
from forerun.reporter import SILENT, Reporter
from forerun.weights_io.gguf.architecture import Floats, Metadata, TensorSource, metadata_of
from forerun.weights_io.gguf.block_types import FILE_TYPES, encoded, exact_blocks, tensor_types
from forerun.weights_io.gguf.vocabulary import Vocabulary, model_name, vocabulary_of
from forerun.weights_io.packed import opened_snapshot
from forerun.weights_io.write import float16_error

SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "eot": "eot", "unknown": "unknown", "padding": "padding"}
# The largest error of a weight, relative to the root mean square of its tensor, averaged over the tensor.
ERROR_LIMITS = {"Q8_0": 0.02, "Q6_K": 0.05, "Q5_0": 0.1, "Q4_K": 0.2, "Q4_0": 0.2}


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that was written and compared."""

    path: Path
    kind: str
    tensors: int
    error: float  # root mean square of the change of the weights, relative to that of the weights
    notes: tuple[str, ...]
    bos: str | None  # the text of the begin token, if llama.cpp adds it to every prompt

    @property
    def proof(self) -> str:
        """A sentence about the comparison."""
        change = f"; quantization changed the weights by {self.error:.2%} (RMS)" if self.error else ""
        return f"GGUF read back from disk: {self.tensors} tensors are those of the folder{change}."


def require_gguf() -> None:
    """Raise a UserError if the package gguf is not installed."""
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            "E-WEIGHTS-020",
            "GGUF files need the package gguf",
            why="it is not installed",
            fix=install_command("gguf"),
        ) from error


def write_gguf(
    folder: Path,
    path: Path,
    kind: str,
    *,
    name: str,
    ends: Sequence[int],
    default_context: int | None = None,
    reporter: Reporter = SILENT,
) -> GgufFile:
    """Write the model in an exported folder as a GGUF file, read it back and compare it.

    Host memory is bounded by a few times the largest tensor.

    Args:
        folder: The folder of the export, with the complete model.
        path: The file to write.
        kind: A key of `FILE_TYPES`.
        name: The name of the model in the file.
        ends: The ids that end an answer; the first one ends a turn.
        default_context: The length of the context if config.json has none, in tokens.
        reporter: receives a line for each part of the work.

    Raises:
        UserError: llama.cpp cannot compute the model or its tokenizer, or the written file differs.
    """
    require_gguf()
    import gguf

    snapshot = Snapshot(str(folder), folder, None)
    found = read_snapshot(snapshot, str(folder / "config.json"))
    family, config = found.family, found.config
    metadata = metadata_of(family, config, text_of(snapshot.config()), default_context)
    vocabulary = vocabulary_of(folder, config.vocab, ends)
    model: Any = model_for(config)
    with opened_snapshot(snapshot) as weights:
        source = TensorSource(weights, family, model, config, metadata)
        types = tensor_types(source.tensors, kind, config.layers, config.tied)
        reporter.info(f"writing {path.name}: {_counted(types)}")
        writer = gguf.GGUFWriter(path, metadata.architecture.name)
        try:
            _add_metadata(writer, metadata, vocabulary, name, kind)
            if (template := chat_template(folder)) is not None:
                writer.add_chat_template(template)
            exact, integers = _write_tensors(writer, source, types)
        finally:
            writer.close()
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        reporter.info("reading the GGUF file back and comparing")
        error = _compare(path, source, types)
    bos = vocabulary.tokens[vocabulary.special["bos"]] if vocabulary.add_bos else None
    parts = () if family.wrapper is None else ("the file has the text model only, without images, video and audio",)
    notes = (*parts, *metadata.notes, *_substitution_notes(types, kind), *_integer_notes(exact, integers))
    return GgufFile(path, kind, len(types), error, notes, bos)


def _add_metadata(writer: Any, metadata: Metadata, vocabulary: Vocabulary, name: str, kind: str) -> None:
    import gguf

    writer.add_name(model_name(name, vocabulary))
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind][0]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in metadata.keys.items():
        if key == "general.architecture":
            continue  # the writer has added it
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    for key, number in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{SPECIAL_KEYS[key]}_token_id", number)
    writer.add_add_bos_token(vocabulary.add_bos)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)


def _write_tensors(writer: Any, source: TensorSource, types: dict[str, str]) -> tuple[int, int]:
    """Write the tensors one at a time. The header needs all shapes and sizes first.

    Returns the number of matrices whose trained integers were kept exactly, and that of all matrices of integers.
    """
    import gguf

    for tensor in source.tensors:
        kind = gguf.GGMLQuantizationType[types[tensor.name]]
        weights_of_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = math.prod(tensor.shape) // weights_of_block * block_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    exact, integers = 0, 0
    for tensor in source.tensors:
        value = source.value(tensor)
        if types[tensor.name] == "F16" and not (np.abs(value) <= np.finfo(np.float16).max).all():
            raise float16_error(tensor.name)
        steps = source.steps(tensor)
        kept = None if steps is None else exact_blocks(value, steps, types[tensor.name])
        writer.write_tensor_data(encoded(value, types[tensor.name]) if kept is None else kept)
        exact, integers = exact + (kept is not None), integers + source.is_integer(tensor)
    return exact, integers


def _compare(path: Path, source: TensorSource, types: dict[str, str]) -> float:
    """Return the relative change of all weights. Raise a UserError if the file is not what was written."""
    import gguf

    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    if list(read) != list(types):
        raise _failed(f"it has {len(read)} tensors instead of {len(types)}")
    changed, total = 0.0, 0.0
    for tensor in source.tensors:
        kind, value = types[tensor.name], source.value(tensor)
        stored = gguf.quants.dequantize(read[tensor.name].data, gguf.GGMLQuantizationType[kind])
        stored = stored.reshape(tensor.shape)
        difference, size = _energy(stored - value), _energy(value)
        exact = {"F32": np.float32, "F16": np.float16}.get(kind)
        if exact is not None:
            correct = np.array_equal(stored, value.astype(exact).astype(np.float32))
        elif kind == "BF16":
            correct = difference <= size * 2.0**-16
        else:
            correct = difference <= size * ERROR_LIMITS[kind] ** 2
        if not correct or not np.isfinite(stored).all():
            raise _failed(f"{tensor.name} differs from the exported folder")
        changed, total = changed + difference, total + size
    return math.sqrt(changed / total) if total else 0.0


def _energy(value: Floats | NDArray[Any]) -> float:
    return float(np.vdot(value.astype(np.float32), value.astype(np.float32)))


def _counted(types: dict[str, str]) -> str:
    return ", ".join(f"{count} tensors {kind}" for kind, count in sorted(Counter(types.values()).items()))


def _substitution_notes(types: dict[str, str], kind: str) -> list[str]:
    wanted = FILE_TYPES[kind][1]
    if kind != "q4_k_m" and wanted not in ("Q8_0", "Q5_0", "Q4_0"):
        return []
    usual = {wanted, "F32", "Q6_K"}
    others = Counter(one for one in types.values() if one not in usual)
    if not others:
        return []
    counts = " and ".join(f"{count} as {one}" for one, count in sorted(others.items()))
    return [f"{sum(others.values())} matrices have rows that do not divide into blocks of {wanted}: {counts}"]


def _integer_notes(exact: int, integers: int) -> list[str]:
    if not integers:
        return []
    if exact == integers:
        return [f"all {exact} matrices that were trained as integers have the same integers and scales"]
    return [
        f"{integers - exact} of {integers} matrices that were trained as integers are rounded again: q8_0, or q4_0 for "
        "int4, keeps them exactly if qat.group is a multiple of 32"
    ]


def _failed(what: str) -> UserError:
    return UserError(
        "E-WEIGHTS-023",
        f"the GGUF file was not proven: {what}",
        why="the file is read back and compared before it counts; the export was removed",
        fix="export again; if it fails again, please report it with this text",
    )
