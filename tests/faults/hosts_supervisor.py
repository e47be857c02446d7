"""The supervisor of one host as a process of its own, for the trials: options in, exit code out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from forerun.errors import UserError
from forerun.supervise.host_address import Hosts
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.supervisor import supervise

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    try:
        code = supervise(
            given["command"],
            Hosts(**given["hosts"]),
            Path(given["folder"]),
            secret_file=Path(given["secret"]) if given["secret"] else None,
            identity=given["identity"],
            limits=Limits(**given["limits"]),
        )
    except UserError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
