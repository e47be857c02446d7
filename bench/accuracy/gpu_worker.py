"""A fork server whose workers compile with cuDNN's attention on A100 and RTX 4090, too.

Published runs on these GPUs call flash attention on rows of one document each. forerun itself uses XLA's attention
there, because cuDNN's kernels for packed documents need a newer GPU. The compiler accepts the call for any GPU, so the
program has the work of the published one. Such a program is only compiled, never run.
"""

from __future__ import annotations

import sys

from forerun.planner.compile.fork_server import main
from forerun.program import kernels

AMPERE_AND_ADA, LARGEST_HEAD = 8, 128

if __name__ == "__main__":
    kernels._LARGEST_HEADS.setdefault(AMPERE_AND_ADA, LARGEST_HEAD)  # type: ignore[attr-defined]
    main(int(sys.argv[1]))
