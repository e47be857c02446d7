"""Makes the two parts that the tests of this folder share importable: `hub_server` and `hostile`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
