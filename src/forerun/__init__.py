"""Plan, train and use language models on TPUs, GPUs and CPUs, from one job.

```python
import forerun as fr

job = fr.load_job("job.yaml", "optimizer.lr=8e-5")
plan = fr.plan(job, on=["v6e-1", "v5e-8"])
run = fr.train(job)
model = fr.load_model(run.folder)
print(model.generate("Alice was"))
```

The names in `__all__` are the public API. All other modules are private and may change in any release. Each name is
imported on first use: `import forerun` itself imports neither jax nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.version import __version__

if TYPE_CHECKING:
    from forerun.api.checking import JobReport as JobReport
    from forerun.api.checking import check as check
    from forerun.api.cloud_runs import cloud_resources as cloud_resources
    from forerun.api.cloud_runs import fetch_run as fetch_run
    from forerun.api.dataset import DataReport as DataReport
    from forerun.api.dataset import compare_ledger as compare_ledger
    from forerun.api.dataset import inspect_data as inspect_data
    from forerun.api.dataset import tokenize_data as tokenize_data
    from forerun.api.dataset import verify_data as verify_data
    from forerun.api.exporting import Export as Export
    from forerun.api.exporting import TeacherCache as TeacherCache
    from forerun.api.exporting import TeacherCachePlan as TeacherCachePlan
    from forerun.api.exporting import cache_teacher as cache_teacher
    from forerun.api.exporting import export as export
    from forerun.api.exporting import plan_teacher_cache as plan_teacher_cache
    from forerun.api.jobs import convert as convert
    from forerun.api.jobs import create_job as create_job
    from forerun.api.jobs import job_schema as job_schema
    from forerun.api.jobs import load_job as load_job
    from forerun.api.language_model import Answer as Answer
    from forerun.api.language_model import Evaluation as Evaluation
    from forerun.api.language_model import LanguageModel as LanguageModel
    from forerun.api.language_model import load_model as load_model
    from forerun.api.listing import runs as runs
    from forerun.api.machine import diagnose as diagnose
    from forerun.api.machine import explain as explain
    from forerun.api.machine import hardware_table as hardware_table
    from forerun.api.planning import Plan as Plan
    from forerun.api.planning import SearchResult as SearchResult
    from forerun.api.planning import plan as plan
    from forerun.api.planning import search as search
    from forerun.api.profiling import Profile as Profile
    from forerun.api.profiling import profile as profile
    from forerun.api.reporting import RunComparison as RunComparison
    from forerun.api.reporting import RunReport as RunReport
    from forerun.api.reporting import compare_runs as compare_runs
    from forerun.api.reporting import report_run as report_run
    from forerun.api.stages import Stages as Stages
    from forerun.api.stages import StagesPlan as StagesPlan
    from forerun.api.stages import load_stages as load_stages
    from forerun.api.stepping import TrainingProgram as TrainingProgram
    from forerun.api.stepping import build as build
    from forerun.api.sweeping import Sweep as Sweep
    from forerun.api.sweeping import sweep as sweep
    from forerun.api.tables import Table as Table
    from forerun.api.tokenizing import TokenizerReport as TokenizerReport
    from forerun.api.tokenizing import TrainedTokenizer as TrainedTokenizer
    from forerun.api.tokenizing import inspect_tokenizer as inspect_tokenizer
    from forerun.api.tokenizing import train_tokenizer as train_tokenizer
    from forerun.api.training import Run as Run
    from forerun.api.training import open_run as open_run
    from forerun.api.training import train as train
    from forerun.cloud.view.run_rows import CloudRow as CloudRow
    from forerun.config.migration.converted_job import ConvertedJob as ConvertedJob
    from forerun.config.schema import Job as Job
    from forerun.errors import UserError as UserError
    from forerun.watch.run_list import RunEntry as RunEntry

# The module of each public name. A public name must not be the name of a module in this package: importing the module
# would replace the attribute, so that `forerun.plan` could be a function or a module.
_MODULES = {
    "forerun.api.checking": ("JobReport", "check"),
    "forerun.api.cloud_runs": ("cloud_resources", "fetch_run"),
    "forerun.api.dataset": ("DataReport", "compare_ledger", "inspect_data", "tokenize_data", "verify_data"),
    "forerun.api.exporting": (
        "Export",
        "TeacherCache",
        "TeacherCachePlan",
        "cache_teacher",
        "export",
        "plan_teacher_cache",
    ),
    "forerun.api.jobs": ("convert", "create_job", "job_schema", "load_job"),
    "forerun.api.language_model": ("Answer", "Evaluation", "LanguageModel", "load_model"),
    "forerun.api.listing": ("runs",),
    "forerun.api.machine": ("diagnose", "explain", "hardware_table"),
    "forerun.api.planning": ("Plan", "SearchResult", "plan", "search"),
    "forerun.api.reporting": ("RunComparison", "RunReport", "compare_runs", "report_run"),
    "forerun.api.profiling": ("Profile", "profile"),
    "forerun.api.stages": ("Stages", "StagesPlan", "load_stages"),
    "forerun.api.stepping": ("TrainingProgram", "build"),
    "forerun.api.sweeping": ("Sweep", "sweep"),
    "forerun.api.tables": ("Table",),
    "forerun.api.tokenizing": ("TokenizerReport", "TrainedTokenizer", "inspect_tokenizer", "train_tokenizer"),
    "forerun.api.training": ("Run", "open_run", "train"),
    "forerun.cloud.view.run_rows": ("CloudRow",),
    "forerun.config.migration.converted_job": ("ConvertedJob",),
    "forerun.config.schema": ("Job",),
    "forerun.errors": ("UserError",),
    "forerun.watch.run_list": ("RunEntry",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion in notebooks and shells."""
    return sorted(__all__)
