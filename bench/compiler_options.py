"""Plan all bench jobs with the compiler options of an earlier version and with today's, with the same time model.

python bench/compiler_options.py [name ...]   # needs libtpu (the `plan` extra), no TPU; 32 compiles, 20 CPU s each
python bench/compiler_options.py --table      # only the table of docs/reference/compiler-options.md, from the results

Writes one JSON line per job to bench/results/compiler_options.jsonl. The scheduled programs are stored outside the
repository (FORERUN_OPTIONS_CACHE, or ~/.cache/forerun). A program that is stored is simulated again, not compiled.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import threading
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.config.load import load
from forerun.hardware.chips import device_kind_of
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler
from forerun.planner.compile.request import CompileRequest, requests_of
from forerun.planner.hlo import parse
from forerun.planner.time.prediction import step_time
from forerun.program.compiler_options import compiler_options
from forerun.resolve.resolved_job import ResolvedJob

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "compiler_options.jsonl"
PAGE = HERE.parent / "docs" / "reference" / "compiler-options.md"
CACHE = Path(os.environ.get("FORERUN_OPTIONS_CACHE", Path.home() / ".cache" / "forerun" / "compiler_options"))
START, END = "<!-- old and new options -->\n", "<!-- end of old and new options -->\n"
# The options of commit 2990083, before they depended on the mesh. Other generations had none.
_V5E = (
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_overlap_compute_collective_tc",
    "xla_enable_async_all_gather",
)
OLD: dict[str, dict[str, str]] = {
    "v5e": dict.fromkeys(_V5E, "true"),
    "v6e": {
        "xla_tpu_scoped_vmem_limit_kib": "98304",
        "xla_tpu_enable_windowed_einsum_for_all_gather": "false",
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": "false",
    },
}
_SEARCHED = "remat={policy: named, keep: [attention_out], offload: [layer_in]}"  # what `plan --search` finds


@dataclass(frozen=True)
class Case:
    """A job of bench/jobs on a slice."""

    job: str
    slice: str
    overrides: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return " ".join((self.job, self.slice, *self.overrides))

    def question(self, options: dict[str, Any] | None = None) -> CompileRequest:
        """Return the compile request with these options, or with the default ones."""
        job = load(HERE / "jobs" / f"{self.job}.yaml", self.overrides).job
        question = requests_of(ResolvedJob(job), [slice_named(self.slice)])[0]
        if options is None:
            return question
        own = dict.fromkeys(defaults(question), None) | options
        changed = job.model_copy(update={"compiler_options": own})
        return requests_of(ResolvedJob(changed), [slice_named(self.slice)])[0]

    def old(self) -> dict[str, Any]:
        return OLD.get(slice_named(self.slice).chip.name, {})


CASES = (
    Case("qwen3-0.6b", "v6e-1", ("batch=4",)),
    Case("qwen3-0.6b", "v5e-8"),
    Case("qwen3-0.6b", "v5e-8", ("mesh.data=8", "mesh.fsdp=1")),
    Case("qwen3-0.6b", "v6e-8"),
    Case("qwen3-0.6b", "v6e-8", ("mesh.data=8", "mesh.fsdp=1")),
    Case("llama3.1-8b", "v6e-8"),
    Case("llama3.1-8b", "v6e-8", (_SEARCHED,)),
    Case("llama3.1-8b", "v6e-16", ("mesh.tp=4", "micro_batch=4", "batch=16")),
    Case("llama3.1-8b", "v5e-32", ("batch=32", "micro_batch=1", "sequence=4096")),
    Case("llama3.1-8b", "v5e-32", ("batch=32", "micro_batch=4", "sequence=4096", "mesh.tp=4")),
    Case("llama3.1-8b", "v5p-16", ("batch=32", "micro_batch=4")),
    Case("llama3.1-8b", "v5p-16", ("batch=32", "micro_batch=8", "mesh.tp=4")),
    Case("llama3.1-8b", "v4-32", ("batch=32", "micro_batch=1")),
    Case("llama3.1-8b", "v4-32", ("batch=32", "micro_batch=4", "mesh.tp=4")),
    Case("llama3.1-8b", "tpu7x-2x2x1", ("batch=32", "micro_batch=4")),
    Case("llama3.1-8b", "tpu7x-2x2x1", ("batch=32", "micro_batch=8", "mesh.tp=4")),
    Case("llama3.1-8b-1024-chips", "v5p-2048"),
    Case("llama3.1-70b", "v6e-256"),
    Case("default-128b", "v5e-256"),
    Case("lora-qwen3-0.6b", "v6e-1"),
    Case("lora-llama3.1-8b", "v5e-8"),
    Case("qlora-llama3.1-8b", "v6e-1"),
    Case("smollm2-135m", "v3-8"),
    Case("lora-qwen3.5-4b", "v5e-8"),
    Case("lora-gemma-4-e4b", "v6e-8"),
    Case("gemma-4-e4b", "v6e-8"),
    Case("qwen3.5-4b", "v6e-8"),
    Case("lora-qwen3.5-27b", "v6e-8"),
    Case("qwen3.5-27b", "v6e-32"),
    Case("lora-gemma-4-31b", "v6e-8"),
    Case("gemma-4-31b", "v6e-32"),
)


def defaults(question: CompileRequest) -> dict[str, Any]:
    """Return the options that forerun uses for the layout of a request."""
    chip = question.slice.chip
    return compiler_options(question.slice.platform, device_kind_of(chip) or "", question.mesh_shape()).values


def stored_path(question: CompileRequest, options: dict[str, Any]) -> Path:
    """Return the file of a compiled program. Its name depends on the job, the slice, the options and the compiler."""
    job = question.job.model_dump(mode="json", exclude={"compiler_options", "data", "name"}, exclude_defaults=True)
    content = [job, question.slice.name, dict(sorted(options.items())), version("libtpu")]
    return CACHE / f"{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]}.json.gz"


def compiled(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Return the scheduled program and the memory of a case with these options, from the store or the compiler."""
    path = stored_path(case.question(), options)
    if path.exists():
        content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        return content
    kept: list[str] = []

    def keep(text: str) -> Any:
        kept.append(text)
        return parse(text)

    compiler.parse = keep  # type: ignore[attr-defined]
    answer = compiler.ask(case.question(options), threading.Event(), lambda phase: None)
    content = {"fits": answer.fits, "peak_bytes": answer.memory.peak_bytes, "flops": answer.flops_per_step}
    content |= {"mesh": answer.mesh, "tokens": answer.tokens_per_step, "program": kept[-1] if answer.fits else ""}
    CACHE.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(content).encode(), 3))
    return content


def planned(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Return the predicted time, its parts, and the peak of a case with these options."""
    found, question = compiled(case, options), case.question()
    row = {"fits": found["fits"], "peak_bytes": found["peak_bytes"]}
    if found["fits"]:
        step = step_time(parse(found["program"]), question.slice, found["flops"] / question.devices)
        row |= {"seconds": step.mid_seconds, "parts_seconds": dict(step.parts_seconds)}
        row |= {"tokens_per_second_per_chip": found["tokens"] / step.mid_seconds / question.slice.chips}
    return row


def compared(case: Case) -> dict[str, Any]:
    """Return a line of the results: a case with the earlier options and with today's.

    A case whose options are the same has no times: both programs are the same.
    """
    question = case.question()
    new = defaults(question)
    changed = {name: new.get(name) for name in sorted({*case.old(), *new}) if case.old().get(name) != new.get(name)}
    row = {"case": case.label, "mesh": str(question.mesh_shape()), "libtpu": version("libtpu"), "changed": changed}
    if changed:
        row |= {"old": planned(case, case.old()), "new": planned(case, new)}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table, with a line for each case that was not measured."""
    lines = ["| job, slice, changes | mesh | before s | now s | change |", "| --- | --- | ---: | ---: | ---: |"]
    measured = {row["case"] for row in rows}
    for row in [*rows, *({"case": one.label} for one in CASES if one.label not in measured)]:
        old, new = row.get("old", {}).get("seconds"), row.get("new", {}).get("seconds")
        if "changed" not in row:
            times = "- | - | not measured"
        elif not row["changed"]:
            times = "- | - | the same options"
        elif old and new:
            times = f"{old:.4g} | {new:.4g} | {100 * (new / old - 1):+.1f} %"
        else:
            times = f"{_fit(old)} | {_fit(new)} | -"
        lines.append(f"| {row['case']} | {row.get('mesh', '-')} | {times} |")
    return "\n".join(lines) + "\n"


def _fit(seconds: float | None) -> str:
    return f"{seconds:.4g}" if seconds else "does not fit"


def slower(row: dict[str, Any]) -> bool:
    """Return whether a case is slower with today's options, or does not fit with them although it did before."""
    if not row["changed"] or not row["old"]["fits"]:
        return False
    return not row["new"]["fits"] or row["new"]["seconds"] > 1.001 * row["old"]["seconds"]


def write_table() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    before, rest = PAGE.read_text().split(START)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{table(rows)}\n{END}{after}")


def main(words: list[str]) -> int:
    if words == ["--table"]:
        write_table()
        return 0
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    rows = {row["case"]: row for row in known}
    for case in CASES:
        if words and not any(word in case.label for word in words):
            continue
        rows[case.label] = row = compared(case)
        print(table([row]).splitlines()[2], flush=True)
        ordered = [rows[one.label] for one in CASES if one.label in rows]
        RESULTS.write_text("".join(json.dumps(one) + "\n" for one in ordered))
    worse = [row["case"] for row in rows.values() if slower(row)]
    print("slower than before:", ", ".join(worse) or "none")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
