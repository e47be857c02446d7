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


def test_a_worker_that_needs_too_much_memory_ends_with_an_error_and_is_not_started_again(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_str(byte_level().to_str())
    made.normalizer = normalizers.Replace("e", "e" * GROWTH)
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "e" * CHARACTERS}) + "\n")
    (tmp_path / "job.yaml").write_text(
        f"model: {{layers: 1, embed: 32, heads: 2}}\n"
        f"data: {{path: data.jsonl, tokenizer: {saved(made, tmp_path)}, store: store}}\nsteps: 1\n"
    )
    # Every start of a worker is recorded: Python imports sitecustomize when it starts.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'forerun.data.tokens.worker' in sys.orig_argv: open('starts', 'a').write('x')\n"
    )
    command = [sys.executable, "-m", "forerun.cli.main", "data", "job.yaml"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 2, said
    assert LIMIT in said
    assert (tmp_path / "starts").read_text() == "x"
    allowed = BASE_BYTES + BYTES_PER_CHARACTER * CHARACTERS
    assert usage.ru_maxrss * 1024 < allowed + 512 * MIB  # of the largest process: what it had before, and the limit
