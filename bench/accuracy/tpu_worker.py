"""The compiler's child process with the compiler flags and the attention kernel of a published run.

Some published flags are refused in a job, because the newest compiler calls them unsafe on this chip, or because they
change results. Such a program is only compiled here, never run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SETTINGS = "FORERUN_ACCURACY_SETTINGS"  # the environment variable: {"options": ..., "kernel": ...}, both may be null

if __name__ == "__main__":
    from forerun.nn.attention import Kernel
    from forerun.planner.compile.worker import main
    from forerun.program import build, kernels
    from forerun.program.compiler_options import CompilerOptions

    settings = json.loads(os.environ[SETTINGS])
    if settings["options"] is not None:
        build.compiler_options = lambda *_: CompilerOptions(settings["options"])  # type: ignore[assignment]
    if settings["kernel"] is not None:
        choice = kernels.AttentionChoice(Kernel(**settings["kernel"]))
        kernels.attention = lambda *_, **__: choice  # type: ignore[assignment]
    sys.exit(main(Path(sys.argv[1])))
