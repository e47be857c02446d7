"""The program of the unit `forerun-agent.service`: `python -m forerun.cloud.host /var/lib/forerun/agent.json`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forerun.cloud.host.start import start_agent
from forerun.errors import UserError
from forerun.exit_codes import USER_MISTAKE


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m forerun.cloud.host")
    parser.add_argument("settings", type=Path, help="the settings of the agent, agent.json")
    parser.add_argument("--root", type=Path, default=Path("/"), help="the root of the host's file tree, for tests")
    parser.add_argument("--speed", type=float, default=1.0, help="shorten all waits by this factor, for tests")
    args = parser.parse_args(arguments)
    try:
        return start_agent(args.settings, args.root, args.speed)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return USER_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
