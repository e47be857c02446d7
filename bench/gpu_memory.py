"""Compare the early memory report of GPU programs with jax's figures of the complete compile.

python bench/gpu_memory.py     # about two minutes; needs the extra `plan-gpu`, no GPU

`plan` reads the report before the compiler generates code. Here each program is compiled to the end, and
`memory_analysis()` of the executable is the reference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu_memory.json"
OFFLOAD = "remat={policy: named, offload: [layer_in]}"
TARGETS = (
    ("qwen3-0.6b", "h100-1", "batch=4"),
    ("qwen3-0.6b", "h100-8"),
    ("qwen3-0.6b", "h100-1", "batch=4", OFFLOAD),
    ("llama3.1-8b", "h100-8", "sequence=4096", "batch=8", "micro_batch=1"),
)


def compare(job_name: str, machine: str, overrides: list[str], folder: Path) -> dict[str, object]:
    """Compile a job to the end in this process, with its dump in `folder`, and return both figures."""
    from forerun.config.load import load
    from forerun.planner.compile.request import requests_of, slices_named
    from forerun.planner.compile.worker import argument_groups, limited_memory, program_for
    from forerun.planner.memory import memory_report
    from forerun.resolve.resolved_job import ResolvedJob

    job = load(HERE / "jobs" / f"{job_name}.yaml", overrides).job
    question = requests_of(ResolvedJob(job), slices_named([machine]))[0]
    program = program_for(question)
    lowered = program.trace().lower(lowering_platforms=("cuda",))
    with limited_memory(question.slice.chip.usable_bytes):
        stats = lowered.compile(compiler_options=program.compiler_options).memory_analysis()
    report = memory_report(folder, argument_groups(program))
    return {
        "job": job_name,
        "machine": machine,
        "overrides": overrides,
        "report_peak_bytes": int(report.peak_bytes),
        "arguments_and_temporaries_bytes": stats.argument_size_in_bytes + stats.temp_size_in_bytes,
        "peak_memory_bytes": stats.peak_memory_in_bytes,
        "report_host_bytes": int(report.host_bytes),
        "host_temporaries_bytes": stats.host_temp_size_in_bytes,
    }


def main() -> int:
    """Run each target in a new process, because XLA reads its flags once."""
    rows = []
    for target in TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            flags = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=jit_step --xla_gpu_autotune_level=0"
            environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            command = [sys.executable, __file__, folder, *target]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        more = rows[-1]["report_peak_bytes"] - rows[-1]["arguments_and_temporaries_bytes"]
        print(f"{' '.join(target)}: {rows[-1]['report_peak_bytes']:,} bytes, {more:,} more than jax", flush=True)
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    known[f"jax-{version('jax')}"] = {"date": datetime.now(UTC).date().isoformat(), "targets": rows}
    RESULTS.write_text(json.dumps(known, indent=2) + "\n", "utf-8")
    RESULTS.with_suffix(".md").write_text(table(known), "utf-8")
    return 0


def table(known: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Return the results of all versions as a table for the documentation."""
    lines = [
        "| jax | job | machine | report, bytes | more, bytes | host, bytes |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for name, one in known.items():
        for row in one["targets"]:
            job = f"{row['job']} `{' '.join(row['overrides'])}`" if row["overrides"] else row["job"]
            more = row["report_peak_bytes"] - row["arguments_and_temporaries_bytes"]
            figures = (row["report_peak_bytes"], more, row["report_host_bytes"])
            cells = (name.removeprefix("jax-"), job, row["machine"], *(f"{figure:,}" for figure in figures))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    print(json.dumps(compare(sys.argv[2], sys.argv[3], sys.argv[4:], Path(sys.argv[1]))))
