"""These programs run for milliseconds and compile for seconds: LLVM's optimizations would be most of the time.

Makes what the tests of this folder share importable.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
