"""The weights of a checkpoint as views of memory-mapped files, without copies."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from forerun.errors import UserError
from forerun.hub.documents import INDEX_NAME, read_index
from forerun.hub.files import open_regular, roots_of, shown
from forerun.hub.safetensors.headers import Header, TensorInfo, header_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SINGLE_NAME = "model.safetensors"
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_COMPARED_BYTES = 1 << 24
_NUMPY_NAMES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BF16": "bfloat16", "BOOL": "bool"}
_NUMPY_KINDS = {"F": "float", "I": "int", "U": "uint"}


@dataclass
class _Mapped:
    """An open, memory-mapped file."""

    descriptor: int
    pages: mmap.mmap
    header: Header


class Weights(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint: a mapping from names to byte ranges, and `view` for the data.

    Use it as a context manager.
    """

    def __init__(self, folder: Path, roots: tuple[Path, ...], only: str | None = None) -> None:
        self.folder, self._only = folder, only
        self._files: dict[Path, _Mapped] = {}
        self._tensors: dict[str, TensorInfo] = {}
        try:
            self._open(roots)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all files, merged."""
        return {key: value for file in self._files.values() for key, value in file.header.metadata.items()}

    @property
    def total_bytes(self) -> int:
        return sum(info.data_bytes for info in self._tensors.values())

    def view(self, name: str) -> NDArray[Any]:
        """Return the tensor as a read-only view of the mapped file.

        Raise a UserError if the size of the file has changed since it was opened. Reading pages beyond the end of a
        truncated file would kill the process (SIGBUS).
        """
        import numpy as np

        info = self._tensors[name]
        file = self._files[info.file]
        size = os.fstat(file.descriptor).st_size
        if size != file.header.file_bytes:
            raise UserError(
                "E-HUB-036",
                f"{info.file} changed while it was read",
                why=f"it had {file.header.file_bytes} bytes when it was opened and has {size} now",
                fix="make sure that no other process writes to the folder, then run the same command again",
            )
        dtype = numpy_dtype(info.dtype)
        if info.data_bytes == 0:
            empty = np.empty(info.shape, dtype)
            empty.flags.writeable = False
            return empty
        flat = np.frombuffer(file.pages, dtype, count=info.data_bytes // dtype.itemsize, offset=info.begin)
        return flat.reshape(info.shape)

    def release(self, name: str) -> None:
        """Let the kernel drop the tensor's pages from memory. A later view reads them again."""
        info = self._tensors[name]
        begin = info.begin - info.begin % mmap.PAGESIZE
        if info.data_bytes:
            self._files[info.file].pages.madvise(mmap.MADV_DONTNEED, begin, info.end - begin)

    def close(self) -> None:
        """Close the files. A view that is still in use keeps its mapping alive."""
        while self._files:
            _, file = self._files.popitem()
            with suppress(BufferError):
                file.pages.close()
            os.close(file.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, roots: tuple[Path, ...]) -> None:
        index = None if self._only else read_index(self.folder, roots)
        for file in [self._only] if self._only else _chosen(self.folder, index):
            header = self._map(self.folder / file, roots)
            for name, info in header.tensors.items():
                if name in self._tensors:
                    raise UserError(
                        "E-HUB-037",
                        f"tensor {shown(name)} is defined twice",
                        why=f"in {self._tensors[name].file.name} and in {file}, in {self.folder}",
                        fix="download the checkpoint again: its shards do not belong together",
                    )
                self._tensors[name] = info
        if index is not None:
            self._check_index(index)

    def _map(self, path: Path, roots: tuple[Path, ...]) -> Header:
        descriptor = open_regular(path, roots)
        try:
            header = header_of(descriptor, path)
            pages = mmap.mmap(descriptor, header.file_bytes, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(descriptor)
            raise
        self._files[path] = _Mapped(descriptor, pages, header)
        return header

    def _check_index(self, index: dict[str, str]) -> None:
        wrong = [name for name, file in index.items() if name not in self._tensors or self._file(name) != file]
        if wrong:
            found = f"it is in {self._file(wrong[0])}" if wrong[0] in self._tensors else "no file has it"
            raise self._disagrees(f"tensor {shown(wrong[0])} is not in {index[wrong[0]]}: {found}", len(wrong))
        extra = [name for name in self._tensors if name not in index]
        if extra:
            raise self._disagrees(f"tensor {shown(extra[0])} of {self._file(extra[0])} is not in the index", len(extra))

    def _file(self, name: str) -> str:
        return self._tensors[name].file.name

    def _disagrees(self, why: str, count: int) -> UserError:
        others = f" ({count - 1} more like it)" if count > 1 else ""
        return UserError(
            "E-HUB-038",
            f"{self.folder / INDEX_NAME} disagrees with its files",
            why=why + others,
            fix="download the checkpoint again: index and shards do not belong together",
        )


class Selection(Weights):
    """Some of the tensors of other weights, which are closed together with it."""

    def __init__(self, weights: Weights, chosen: Callable[[str], bool]) -> None:
        self.folder, self._weights = weights.folder, weights
        self._tensors = {name: info for name, info in weights.items() if chosen(name)}

    def view(self, name: str) -> NDArray[Any]:
        return self._weights.view(name)

    def release(self, name: str) -> None:
        self._weights.release(name)

    def close(self) -> None:
        self._weights.close()


def open_weights(folder: Path, roots: tuple[Path, ...] | None = None, *, only: str | None = None) -> Weights:
    """Open the weights in `folder`: model.safetensors, or the shards that model.safetensors.index.json names.

    Args:
        folder: The folder of the checkpoint.
        roots: The folders that may contain the files after links are resolved. None means those of `folder`.
        only: The name of one file to open instead.

    Raises:
        UserError: The folder has no weights, or a file or the index is not valid.
    """
    return Weights(folder, roots_of(folder) if roots is None else roots, only)


def tensor_names(folder: Path) -> frozenset[str] | None:
    """Return the names of the tensors in `folder` from its index or its only file, or None if it has neither yet."""
    roots = roots_of(folder)
    index = read_index(folder, roots)
    if index is not None:
        return frozenset(index)
    if not (folder / SINGLE_NAME).exists():
        return None
    with open_weights(folder, roots) as weights:
        return frozenset(weights)


def weight_files(folder: Path, roots: tuple[Path, ...] | None = None) -> list[str]:
    """Return the names of the files that contain the weights, without opening them."""
    return _chosen(folder, read_index(folder, roots))


def _chosen(folder: Path, index: dict[str, str] | None) -> list[str]:
    single = os.path.lexists(folder / SINGLE_NAME)
    if index is None:
        if single:
            return [SINGLE_NAME]
        raise no_weights(str(folder), [entry.name for entry in folder.iterdir()] if folder.is_dir() else [])
    files = sorted(set(index.values()))
    if single and files != [SINGLE_NAME]:
        raise UserError(
            "E-HUB-039",
            f"{folder} has two sets of weights",
            why=f"it has {SINGLE_NAME}, and {INDEX_NAME} which names {len(files)} other files",
            fix=f"keep one of them: remove {SINGLE_NAME}, or {INDEX_NAME} and its shards",
        )
    return files


def no_weights(where: str, names: list[str]) -> UserError:
    """Return the error for a folder or repository without readable weights. `names` are its files."""
    pickles = sorted(name for name in names if name.endswith(PICKLE_ENDINGS))
    if pickles:
        return UserError(
            "E-HUB-040",
            f"{where} has its weights only as pickle, which can run code when it is loaded",
            why=f"found {', '.join(pickles[:3])}, and no {SINGLE_NAME} or {INDEX_NAME}",
            fix="use a revision or a model with safetensors; or, if you trust it, convert it with transformers:"
            '\nAutoModelForCausalLM.from_pretrained("...").save_pretrained("folder", safe_serialization=True)'
            "\nthen name that folder",
        )
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if "adapter_model.safetensors" in others:
        why = "adapter_model.safetensors is an adapter, not a complete model"
    elif others:
        why = f"found {', '.join(map(shown, others[:3]))}"
    else:
        why = f"it has neither {SINGLE_NAME} nor {INDEX_NAME}"
    return UserError(
        "E-HUB-041", f"{where} has no weights to read", why=why, fix="name a model with safetensors in its top folder"
    )


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype of a safetensors dtype. bfloat16 and the float8 kinds come from ml_dtypes."""
    import numpy as np

    name = _NUMPY_NAMES.get(dtype) or _NUMPY_KINDS[dtype[0]] + dtype[1:]
    if dtype == "BF16" or dtype.startswith("F8"):
        import ml_dtypes

        extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return extended
    return np.dtype(name).newbyteorder("<")


def equal_bytes(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two views of one size have the same bytes. They are compared in pieces, to use little memory."""
    import numpy as np

    a, b = (view.reshape(-1).view(np.uint8) for view in (one, other))
    pieces = (slice(start, start + _COMPARED_BYTES) for start in range(0, a.size, _COMPARED_BYTES))
    return all(np.array_equal(a[piece], b[piece]) for piece in pieces)
