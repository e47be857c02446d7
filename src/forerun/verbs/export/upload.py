"""`forerun export --push`: the folder of an export that is uploaded to the hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forerun.checkpoint.weights import chosen_step
from forerun.errors import UserError
from forerun.hub.documents import read_json
from forerun.hub.upload import push_folder, require_upload
from forerun.reporter import SILENT, Reporter
from forerun.run_folder.run_folder import RunFolder, require_run
from forerun.verbs.export.record import record_export
from forerun.verbs.export.write_model import Exported, export

FOLDER = "exports"  # in the folder of a run, for uploads without --to
_CONTENTS = ("config.json", "adapter_config.json")


def export_and_push(
    source: str,
    to: str | None,
    *,
    dtype: str | None = None,
    merge: bool = False,
    dense: bool = False,
    which: str = "newest",
    gguf: str | None = None,
    push: str | None = None,
    public: bool = False,
    overwrite: bool = False,
    code: str | None = None,
    reporter: Reporter = SILENT,
) -> Exported:
    """Export a run and upload the folder. See `forerun.export` for the arguments."""
    if push is not None:
        require_upload(push)  # before the work of the export
    exported = Exported(Path(source), "") if push is not None and is_export(Path(source)) else None
    if exported is None:
        target = _target(RunFolder(Path(source)), to, push, (dtype, merge, dense, gguf), which, reporter)
        if to is None and is_export(target):
            reporter.info(f"using the complete export {target}")
            exported = Exported(target, "")
        else:
            exported = export(
                source,
                str(target),
                dtype=dtype,
                merge=merge,
                dense=dense,
                which=which,
                gguf=gguf,
                code=code,
                reporter=reporter,
            )
            record_export(RunFolder(Path(source)), exported, reporter)
    if push is None:
        return exported
    _require_public_base(exported.folder)
    message = f"Upload {exported.folder.name}, exported by forerun"
    pushed = push_folder(exported.folder, push, public=public, overwrite=overwrite, message=message, reporter=reporter)
    return replace(exported, upload=pushed)


def _require_public_base(folder: Path) -> None:
    """Raise an error if adapters name their base by a path, which is private and loads on this computer only."""
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


def is_export(folder: Path) -> bool:
    """Return whether a folder is a complete export: it has a model or adapters and the model card, and is not a run."""
    has_model = any((folder / name).is_file() for name in _CONTENTS)
    return has_model and (folder / "README.md").is_file() and not (folder / "job.yaml").exists()


def _target(
    run: RunFolder,
    to: str | None,
    push: str | None,
    options: tuple[str | None, bool, bool, str | None],
    which: str,
    reporter: Reporter,
) -> Path:
    """Return the folder to write. Without `to`, its name has the step and the options, so that it has one content."""
    if to is not None:
        return Path(to)
    if push is None:
        raise UserError(
            "E-COMMAND-052",
            "export needs a folder to write",
            why="neither --to nor --push was given",
            fix="add --to FOLDER, or --push owner/name to upload the model to the hub",
        )
    job = require_run(run, reporter)
    dtype, merge, dense, gguf = options
    words = [dtype, "merged" if merge else None, "dense" if dense else None, gguf]
    name = "-".join(["step", str(chosen_step(run.checkpoints(job), which)), *filter(None, words)])
    return run.path / FOLDER / name
