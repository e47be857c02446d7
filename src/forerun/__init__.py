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
    from forerun.cloud.view.run_rows import CloudRow as CloudRow
    from forerun.config.migration.foreign_file import ConvertedJob as ConvertedJob
    from forerun.config.schema import Job as Job
    from forerun.data.vocabulary.split_report import TokenizerReport as TokenizerReport
    from forerun.errors import UserError as UserError
    from forerun.generate.stream import Answer as Answer
    from forerun.verbs.build import TrainingProgram as TrainingProgram
    from forerun.verbs.build import build as build
    from forerun.verbs.cache import TeacherCachePlan as TeacherCachePlan
    from forerun.verbs.cache import cache_teacher as cache_teacher
    from forerun.verbs.cache import plan_teacher_cache as plan_teacher_cache
    from forerun.verbs.check.check import JobReport as JobReport
    from forerun.verbs.check.check import check as check
    from forerun.verbs.cloud_runs import cloud_resources as cloud_resources
    from forerun.verbs.cloud_runs import fetch_run as fetch_run
    from forerun.verbs.data import DataReport as DataReport
    from forerun.verbs.data import compare_ledger as compare_ledger
    from forerun.verbs.data import inspect_data as inspect_data
    from forerun.verbs.data import tokenize_data as tokenize_data
    from forerun.verbs.data import verify_data as verify_data
    from forerun.verbs.evaluate import Evaluation as Evaluation
    from forerun.verbs.export.export import export as export
    from forerun.verbs.export.result import Export as Export
    from forerun.verbs.job_files import convert as convert
    from forerun.verbs.job_files import create_job as create_job
    from forerun.verbs.job_files import job_schema as job_schema
    from forerun.verbs.job_files import load_job as load_job
    from forerun.verbs.language_model import LanguageModel as LanguageModel
    from forerun.verbs.language_model import load_model as load_model
    from forerun.verbs.machine import diagnose as diagnose
    from forerun.verbs.machine import explain as explain
    from forerun.verbs.machine import hardware_table as hardware_table
    from forerun.verbs.plan import Plan as Plan
    from forerun.verbs.plan import SearchResult as SearchResult
    from forerun.verbs.plan import plan as plan
    from forerun.verbs.plan import search as search
    from forerun.verbs.profile import Profile as Profile
    from forerun.verbs.profile import profile as profile
    from forerun.verbs.reports import RunComparison as RunComparison
    from forerun.verbs.reports import RunReport as RunReport
    from forerun.verbs.reports import compare_runs as compare_runs
    from forerun.verbs.reports import report_run as report_run
    from forerun.verbs.reports import runs as runs
    from forerun.verbs.stages import Stages as Stages
    from forerun.verbs.stages import StagesPlan as StagesPlan
    from forerun.verbs.stages import load_stages as load_stages
    from forerun.verbs.sweep.sweep import Sweep as Sweep
    from forerun.verbs.sweep.sweep import sweep as sweep
    from forerun.verbs.table import Table as Table
    from forerun.verbs.tokenizer import TrainedTokenizer as TrainedTokenizer
    from forerun.verbs.tokenizer import inspect_tokenizer as inspect_tokenizer
    from forerun.verbs.tokenizer import train_tokenizer as train_tokenizer
    from forerun.verbs.train import Run as Run
    from forerun.verbs.train import open_run as open_run
    from forerun.verbs.train import train as train
    from forerun.verbs.write_cache import TeacherCache as TeacherCache
    from forerun.watch.run_list import RunEntry as RunEntry

# The module of each public name. A public name must not be the name of a module in this package: importing the module
# would replace the attribute, so that `forerun.plan` could be a function or a module.
_MODULES = {
    "forerun.verbs.check.check": ("JobReport", "check"),
    "forerun.verbs.cloud_runs": ("cloud_resources", "fetch_run"),
    "forerun.verbs.data": ("DataReport", "compare_ledger", "inspect_data", "tokenize_data", "verify_data"),
    "forerun.data.vocabulary.split_report": ("TokenizerReport",),
    "forerun.generate.stream": ("Answer",),
    "forerun.verbs.cache": ("TeacherCachePlan", "cache_teacher", "plan_teacher_cache"),
    "forerun.verbs.write_cache": ("TeacherCache",),
    "forerun.verbs.export.export": ("export",),
    "forerun.verbs.export.result": ("Export",),
    "forerun.verbs.job_files": ("convert", "create_job", "job_schema", "load_job"),
    "forerun.verbs.evaluate": ("Evaluation",),
    "forerun.verbs.language_model": ("LanguageModel", "load_model"),
    "forerun.verbs.machine": ("diagnose", "explain", "hardware_table"),
    "forerun.verbs.plan": ("Plan", "SearchResult", "plan", "search"),
    "forerun.verbs.reports": ("RunComparison", "RunReport", "compare_runs", "report_run", "runs"),
    "forerun.verbs.profile": ("Profile", "profile"),
    "forerun.verbs.stages": ("Stages", "StagesPlan", "load_stages"),
    "forerun.verbs.build": ("TrainingProgram", "build"),
    "forerun.verbs.sweep.sweep": ("Sweep", "sweep"),
    "forerun.verbs.table": ("Table",),
    "forerun.verbs.tokenizer": ("TrainedTokenizer", "inspect_tokenizer", "train_tokenizer"),
    "forerun.verbs.train": ("Run", "open_run", "train"),
    "forerun.cloud.view.run_rows": ("CloudRow",),
    "forerun.config.migration.foreign_file": ("ConvertedJob",),
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
