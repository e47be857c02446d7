"""A tokenizer that takes all memory is stopped by the kernel, once, with an error that names the limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import tokenizers
from small_tokenizers import byte_level, saved
from tokenizers import normalizers

from forerun.data.tokens.memory import BASE_BYTES, BYTES_PER_CHARACTER, LIMIT
from forerun.units import MIB

CHARACTERS = 1 << 20
GROWTH = 200  # below the limit for a normalizer
# The command measures its children. Measured from here, the peak of this process would count as the command's too:
# Linux keeps it when a new child becomes another program.
SITE = """
import atexit, resource, sys
if "forerun.data.tokens.worker" in sys.orig_argv:
    open("starts", "a").write("x")
elif "forerun" in sys.orig_argv:
    children = lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    atexit.register(lambda: open("peak_kib", "w").write(str(children())))
"""


def test_a_worker_that_needs_too_much_memory_ends_with_an_error_and_is_not_started_again(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_str(byte_level().to_str())
    made.normalizer = normalizers.Replace("e", "e" * GROWTH)
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "e" * CHARACTERS}) + "\n")
    (tmp_path / "job.yaml").write_text(
        f"model: {{layers: 1, embed: 32, heads: 2}}\n"
        f"data: {{path: data.jsonl, tokenizer: {saved(made, tmp_path)}, store: store}}\nsteps: 1\n"
    )
    # Python imports sitecustomize when it starts: each worker leaves a mark, and the command the peak of its workers.
    (tmp_path / "sitecustomize.py").write_text(SITE)
    command = [sys.executable, "-m", "forerun", "data", "job.yaml"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 2, ran.stderr
    assert LIMIT in ran.stderr
    assert (tmp_path / "starts").read_text() == "x"
    allowed = BASE_BYTES + BYTES_PER_CHARACTER * CHARACTERS
    peak_bytes = int((tmp_path / "peak_kib").read_text()) * 1024
    assert peak_bytes < allowed + 512 * MIB  # the limit, and what a worker had before
