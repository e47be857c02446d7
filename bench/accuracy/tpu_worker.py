"""A fork server whose workers compile with the compiler flags, the attention and the layers of a published run.

Some published flags are refused in a job, because the newest compiler calls them unsafe on this chip, or because they
change results. Such a program is only compiled here, never run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# The environment variable with options, kernel and layers as JSON. Forerun's own replace those that are null.
SETTINGS = "FORERUN_ACCURACY_SETTINGS"
LOOP, PLAIN = {"name": "loop"}, {"name": "plain"}  # loop_attention.py instead of a kernel: `attention: xla` in the job


def use_settings() -> None:
    """Replace options, kernel and layers of forerun in this worker."""
    import published_layers
    from loop_attention import loop_attention, plain_attention

    from forerun.nn import attention
    from forerun.nn.attention import Kernel
    from forerun.program import build, kernels
    from forerun.program.compiler_options import CompilerOptions

    settings = json.loads(os.environ[SETTINGS])
    if settings["options"] is not None:
        build.compiler_options = lambda *_: CompilerOptions(settings["options"])  # type: ignore[attr-defined]
    if settings["kernel"] in (LOOP, PLAIN):
        replacement: Any = loop_attention if settings["kernel"] == LOOP else plain_attention
        attention._blockwise = replacement
    elif settings["kernel"] is not None:
        choice = kernels.AttentionChoice(Kernel(**settings["kernel"]))
        kernels.attention = lambda *_, **__: choice  # type: ignore[assignment]
    if settings.get("layers"):
        published_layers.use(settings["layers"])


if __name__ == "__main__":
    from forerun.planner.compile import fork_server, worker

    compile_request = worker.answer

    def answer(asked: str, folder: Path) -> int:
        use_settings()
        return compile_request(asked, folder)

    worker.answer = answer
    fork_server.main(int(sys.argv[1]))
