"""Whether this process is the kernel of a notebook, or runs in one of its cells."""

from __future__ import annotations

import os
import sys


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, whose front end can update HTML.

    The shell of Jupyter is a ZMQInteractiveShell, and that of Colab is a subclass.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


def below_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, or a command in one of its cells.

    Commands have a pseudo-terminal there. The output of a cell shows colours, but does not move the cursor up, so a
    live display would repeat its lines. Jupyter sets the variable for kernels, and their commands inherit it.
    """
    return "JPY_PARENT_PID" in os.environ or in_notebook()
