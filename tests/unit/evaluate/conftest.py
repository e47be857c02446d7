"""These programs run for milliseconds and compile for seconds: LLVM's optimizations would be most of the time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
