"""`forerun explain` and `forerun schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from forerun.verbs.option_types import File, Value


def explain(code: Annotated[str, Value("CODE", is_positional=True)] | None = None) -> int:
    """Print the texts of a code, or all codes with the first line of each error. Needs no network.

    Args:
      code: error code such as E-DATA-017 (default: list all codes)
    """
    from forerun.error_catalog import codes, what_of
    from forerun.verbs.machine import explain as explain_code

    if code is not None:
        print(explain_code(code))
        return 0
    for name in codes():
        # Flush, because reading all files takes about 2 s.
        print(f"{name:<18}{what_of(name).splitlines()[0]}", flush=True)
    return 0


def schema(*, output: File | None = None) -> int:
    """Print the JSON Schema of a job file, for editors.

    Args:
      output: write to this file instead of the terminal
    """
    from forerun.files import write_output
    from forerun.verbs.job_files import job_schema

    text = json.dumps(job_schema(), indent=2)
    if output is None:
        print(text)
        return 0
    write_output(Path(output), text + "\n", fix="name another file with --output")
    print(f"wrote {output}; the first line of a job file makes editors use it:")
    print(f"# yaml-language-server: $schema={output}")
    return 0
