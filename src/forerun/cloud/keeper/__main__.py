"""The program of a keeper: `python -m forerun.cloud.keeper /var/lib/forerun/agent.json`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forerun.cloud.keeper.keeper_process import start_keeper_process
from forerun.errors import UserError
from forerun.exit_codes import USER_MISTAKE


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m forerun.cloud.keeper")
    parser.add_argument("settings", type=Path, help="the settings of the keeper, agent.json")
    args = parser.parse_args(arguments)
    try:
        return start_keeper_process(args.settings, args.settings.parent)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return USER_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
