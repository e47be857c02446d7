"""`export` and `cache_teacher`: a run as a Hugging Face folder, and the cached logits of a teacher."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.config.schema import Job
from forerun.hardware.prices import provider_names
from forerun.planner.compile.compile_progress import CompileProgress
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.pool import answers
from forerun.planner.compile.request import Impossible, slices_named
from forerun.planner.compile.result_cache import cached_fit_result
from forerun.planner.cost.job_cost import Tariff
from forerun.planner.cost.teacher_cost import TeacherCost, possible_slices, teacher_cost, teacher_request
from forerun.reporter import SILENT, LineReporter, Reporter
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolve_model import resolve_model
from forerun.run_folder.stage_folder import run_of
from forerun.supervise.free_tpu import require_free_tpu_for
from forerun.verbs.cache import write_cache as caching
from forerun.verbs.export.upload import export_and_push
from forerun.verbs.export.write_model import Exported as Export
from forerun.verbs.job_files import prepared

__all__ = ["Export", "TeacherCache", "TeacherCachePlan", "cache_teacher", "export", "plan_teacher_cache"]

TeacherCache = caching.Written


def export(
    run: str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    step: str | int = "newest",
    stage: str | None = None,
    merge: bool = False,
    dense: bool = False,
    gguf: str | None = None,
    push: str | None = None,
    public: bool = False,
    overwrite: bool = False,
    code: str | os.PathLike[str] | None = None,
    reporter: Reporter = SILENT,
) -> Export:
    """Write a run as a Hugging Face folder, read it back and compare it with the trained weights.

    A run with a custom model class becomes a folder with its weights, its source files and a README that explains how
    to load them.

    Args:
      run: the folder of the run; with `push`, also a folder that was exported before. The folder of a job file with
        stages means the run of its last stage.
      to: the folder to write. It must not exist, or be empty. With `push`, the default is a folder in that of the run.
      dtype: the dtype of the weights; default: that of the base model, or of the run.
      step: the checkpoint: "newest", "best" (lowest validation loss) or a step.
      stage: with the folder of a job file with stages, another stage than the last one.
      merge: for a run with adapters, write the complete model instead of a PEFT folder.
      dense: for a run with quantization-aware training, write the rounded weights as floats instead of integers.
      gguf: also write a GGUF file of this type, and an Ollama Modelfile: "f16", "bf16", "f32", "q8_0", "q5_0", "q4_0"
        or "q4_k_m". Needs the extra `gguf`.
      push: upload the folder to this repository of the hub, `owner/name`. A new repository is private.
      public: allow that everyone can see the repository.
      overwrite: replace the files of a repository that has other content.
      code: the folder with the custom model class of the run, if it has moved since the training.
      reporter: receives a line for each part of the work.

    Returns:
      The folder, a sentence about the comparison, the GGUF file, and the address of the upload.

    Raises:
      UserError: The folder is not a run, the code of a custom class was not found, the model has no such form, the
        comparison failed, or the upload failed.
    """
    return export_and_push(
        str(run_of(os.fspath(run), stage)),
        None if to is None else os.fspath(to),
        dtype=dtype,
        merge=merge,
        dense=dense,
        which=str(step),
        gguf=gguf,
        push=push,
        public=public,
        overwrite=overwrite,
        code=None if code is None else os.fspath(code),
        reporter=reporter,
    )


def cache_teacher(job: Job | str | os.PathLike[str]) -> TeacherCache:
    """Run the teacher of a job once over all rows, and store its top logits in the folder `distil.cache`.

    A cache that exists is completed; damaged parts are computed again.

    Args:
      job: a job with `distil.teacher` and `distil.cache`, or the path of a job file.

    Returns:
      The folder, the layout of the cache, the number of shards that were written, and the time.

    Raises:
      UserError: The job has no teacher, or the folder holds the cache of another teacher or other data.
    """
    from forerun.track.display.make_display import make_display

    resolved = resolve_model(prepared(job))
    require_free_tpu_for(resolved.job.device, LineReporter(sys.stdout))
    with make_display(sys.stdout) as reporter:
        return caching.cache(resolved, reporter)


@dataclass(frozen=True)
class TeacherCachePlan:
    """The size of a teacher cache, and the time and the cost of computing it on slices.

    Attributes:
      description: rows, tokens, logits and bytes of the cache, in one line.
      rows: the number of rows.
      results: for each slice the compiled result, and the bill, or None if the teacher does not fit.
      impossible: slices for which the program cannot be built.
    """

    description: str
    rows: int
    results: tuple[tuple[FitResult, TeacherCost | None], ...]
    impossible: tuple[Impossible, ...]

    @property
    def fits(self) -> bool:
        """Whether the teacher fits at least one slice."""
        return any(result.fits for result, _ in self.results)


def plan_teacher_cache(
    job: Job | str | os.PathLike[str],
    *,
    on: str | Sequence[str],
    zone: str | None = None,
    provider: str | Sequence[str] = (),
    prices: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> TeacherCachePlan:
    """Compile the teacher of a job for slices, and predict the size, the time and the cost of its cache.

    Args:
      job: a job with `distil.teacher` and `distil.cache`, or the path of a job file.
      on: slices such as `["v6e-1"]`.
      zone: use the prices of this zone; default: the cheapest zone of each chip.
      provider: use only prices of this provider or these providers; default: the cheapest provider of each machine.
      prices: a file with prices that replace the list prices.
      progress: print progress to stderr.
    """
    resolved = resolve_model(prepared(job))
    slices = slices_named([on] if isinstance(on, str) else list(on))
    tariff = Tariff(zone, None if prices is None else os.fspath(prices), providers=provider_names(provider))
    tariff.check()
    slices, impossible = possible_slices(resolved.job, slices)
    caching.require_folder(resolved.job)
    corpus = open_corpus(resolved)
    resolved = resolved.with_data(corpus)
    layout = caching.layout_of(resolved, corpus)
    requests = [teacher_request(resolved, one) for one in slices]
    with CompileProgress(requests, plain_lines=progress) as shown:
        results = answers(requests, shown.phase, cached_fit_result)
    return TeacherCachePlan(
        caching.described(layout),
        layout.rows,
        tuple((result, teacher_cost(result, layout.rows, tariff)) for result in results),
        tuple(impossible),
    )
