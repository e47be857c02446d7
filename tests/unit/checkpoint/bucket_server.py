"""gcp-storage-emulator in a process of its own, with the one thing that it lacks: `ifGenerationMatch=0` is honoured.

with bucket(folder) as environment:         # for the process under test
    subprocess.run(..., env=os.environ | environment)
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

BUCKET = "checkpoints"
READY = "ready on port "


@contextmanager
def bucket(folder: Path) -> Iterator[dict[str, str]]:
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w") as written:
        server = subprocess.Popen(
            [sys.executable, "-u", __file__, str(folder)], stdout=subprocess.PIPE, stderr=written, text=True
        )
    assert server.stdout is not None
    try:
        ready = server.stdout.readline()
        assert ready.startswith(READY), log.read_text()
        host = f"http://127.0.0.1:{int(ready.removeprefix(READY))}"
        yield {
            "STORAGE_EMULATOR_HOST": host,
            "TENSORSTORE_GCS_HTTP_URL": host,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
    finally:
        server.terminate()
        server.wait(60)
        server.stdout.close()


def serve(folder: str) -> None:
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects
    from gcp_storage_emulator.server import create_server

    one_at_a_time = threading.Lock()

    def with_precondition(upload: Callable[..., Any]) -> Callable[..., Any]:
        def handler(request: Any, response: Any, storage: Any) -> Any:
            with one_at_a_time:
                if request.query.get("ifGenerationMatch") == ["0"]:
                    meta = request.data.get("meta", {}) if isinstance(request.data, dict) else {}
                    name = request.query.get("name", [meta.get("name")])[0]
                    try:
                        storage.get_file_obj(request.params["bucket_name"], name)
                    except NotFound:
                        pass
                    else:
                        response.status = HTTPStatus.PRECONDITION_FAILED
                        return None
                return upload(request, response, storage)

        return handler

    for name in ("_multipart_upload", "_media_upload"):
        setattr(objects, name, with_precondition(getattr(objects, name)))
    server = create_server("127.0.0.1", 0, False, BUCKET, data_dir=folder)  # a port that nobody can take meanwhile
    server.start()
    print(f"{READY}{server._api._httpd.server_port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    serve(sys.argv[1])
