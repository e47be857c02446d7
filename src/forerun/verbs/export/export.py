"""`export`: write a run as a Hugging Face folder, and upload it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from forerun.errors import UserError
from forerun.reporter import SILENT, Reporter
from forerun.verbs.export.result import Export, ExportDtype, ExportForm
from forerun.verbs.option_types import Folder, Name, StepName, Value

if TYPE_CHECKING:
    from forerun.run_folder.run_folder import RunFolder

RECORD = "exports.jsonl"  # in the folder of a run: one line for each export, for its report
UPLOADS = "exports"  # in the folder of a run, for uploads without --to
_CONTENTS = ("config.json", "adapter_config.json")


def export(
    run: Annotated[str | os.PathLike[str], Value("RUN")],
    to: Folder | None = None,
    *,
    dtype: ExportDtype | None = None,
    step: StepName = "newest",
    stage: Name | None = None,
    merge: bool = False,
    dense: bool = False,
    gguf: Annotated[str, Value("TYPE", without_value="q8_0")] | None = None,
    push: Annotated[str, Value("OWNER/NAME")] | None = None,
    public: bool = False,
    overwrite: bool = False,
    code: Folder | None = None,
    reporter: Reporter = SILENT,
) -> Export:
    """Write a run as a Hugging Face folder, read it back and compare it with the trained weights.

    A run with a custom model class becomes a folder with its weights, its source files and a README that explains how
    to load them.

    Args:
      run: folder of the run, where that of a job file with stages means its last stage; with `push` also a folder
        that was exported before
      to: folder to write; it must not exist, or be empty (default with `push`: a folder in that of the run)
      dtype: dtype of the weights (default: that of the base model, or of the run)
      step: newest, best (lowest validation loss) or a step
      stage: with stages: the stage to write (default: the last)
      merge: for a run with adapters: write the complete model instead of a PEFT folder
      dense: for a run with qat: write rounded weights as floats instead of integers
      gguf: also write a GGUF file and an Ollama Modelfile: f16, bf16, f32, q8_0, q5_0, q4_0 or q4_k_m (without a
        value: q8_0); needs the extra gguf
      push: upload the folder to this repository of the hub; a new one is private
      public: allow that everyone can see the repository of `push`
      overwrite: replace the files of the repository of `push` if it has other content
      code: for a run with a custom model class: folder of its module, if it has moved since the training
      reporter: receives a line for each part of the work

    Returns:
      The folder, a sentence about the comparison, the GGUF file, and the address of the upload.

    Raises:
      UserError: The folder is not a run, the code of a custom class was not found, the model has no such form, the
        comparison failed, or the upload failed.
    """
    from forerun.hub.upload import push_folder, require_upload
    from forerun.run_folder.run_folder import RunFolder
    from forerun.run_folder.stage_folder import run_of

    if push is not None:
        require_upload(push)  # before the work of the export
    source = Path(run_of(os.fspath(run), stage))
    form = ExportForm(dtype=dtype, merge=merge, dense=dense, step=step, gguf=gguf)
    if push is not None and is_export(source):
        exported = Export(source, "")
    else:
        folder = RunFolder(source)
        target = Path(to) if to is not None else _upload_folder(folder, form, push, reporter)
        if to is None and is_export(target):
            reporter.info(f"using the complete export {target}")
            exported = Export(target, "")
        else:
            from forerun.verbs.export.write_model import write_export

            exported = write_export(
                folder, target, form, code=None if code is None else os.fspath(code), reporter=reporter
            )
            record_export(folder, exported, reporter)
    if push is None:
        return exported
    _require_public_base(exported.folder)
    message = f"Upload {exported.folder.name}, exported by forerun"
    pushed = push_folder(exported.folder, push, public=public, overwrite=overwrite, message=message, reporter=reporter)
    return replace(exported, upload=pushed)


def is_export(folder: Path) -> bool:
    """Return whether a folder is a complete export: it has a model or adapters and the model card, and is not a run."""
    has_model = any((folder / name).is_file() for name in _CONTENTS)
    return has_model and (folder / "README.md").is_file() and not (folder / "job.yaml").exists()


def _upload_folder(run: RunFolder, form: ExportForm, push: str | None, reporter: Reporter) -> Path:
    """Return the folder of an export without `to`. Its name has the step and the form, so that it has one content."""
    from forerun.checkpoint.reader import chosen_step
    from forerun.run_folder.run_folder import require_run

    if push is None:
        raise UserError(
            "E-COMMAND-052",
            "export needs a folder to write",
            why="neither --to nor --push was given",
            fix="add --to FOLDER, or --push owner/name to upload the model to the hub",
        )
    job = require_run(run, reporter)
    words = [form.dtype, "merged" if form.merge else None, "dense" if form.dense else None, form.gguf]
    step = chosen_step(run.checkpoints(job), str(form.step))
    return run.path / UPLOADS / "-".join(["step", str(step), *filter(None, words)])


def _require_public_base(folder: Path) -> None:
    """Raise an error if adapters name their base by a path, which is private and loads on this computer only."""
    from forerun.hub.documents import read_json

    config = folder / "adapter_config.json"
    if not config.is_file():
        return
    base = read_json(config).get("base_model_name_or_path")
    if isinstance(base, str) and Path(base).is_absolute():
        raise UserError(
            "E-HUB-065",
            f"{config} names a folder of this computer, so it is not uploaded",
            why=f"base_model_name_or_path is {base}, which others cannot load",
            fix=f"set it to the hub name of the base, then run forerun export {folder} --push NAME; "
            "or add --merge to upload the complete model",
        )


def record_export(run: RunFolder, exported: Export, reporter: Reporter) -> None:
    """Append a line about an export to the run's list. If it cannot be written, only warn."""
    file = run.path / RECORD
    try:
        line = {
            "unix_seconds": round(time.time(), 3),
            "step": exported.step,
            "folder": str(exported.folder),
            "format": exported.format_name,
            "bytes": sum(path.stat().st_size for path in exported.folder.rglob("*") if path.is_file()),
        }
        # One write of a complete line: a second export at the same time cannot mix its line with this one.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        reporter.warn(f"the export is complete, but {file} was not updated: {error.strerror}")
