"""Run gcp-storage-emulator in its own process, with corrections.

It obeys `ifGenerationMatch=0`. A listing obeys `startOffset` and `endOffset`. An object may be empty. A multipart
upload keeps all its bytes: the emulator's parser drops a carriage return at the end of the content, because it takes it
for a part of the line end that follows.

with bucket(folder) as environment:         # for the process under test
    subprocess.run(..., env=os.environ | environment)
"""

from __future__ import annotations

import json
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


def second_part(multipart: bytes) -> bytes:
    """Return the content of an upload. Its first line is the boundary and shows which line end the client uses."""
    boundary, _ = multipart.split(b"\n", 1)
    end = b"\r\n" if boundary.endswith(b"\r") else b"\n"
    _, _, part, _ = multipart.split(boundary.rstrip())
    _, content = part.split(2 * end, 1)
    return content.removesuffix(end)


def serve(folder: str) -> None:
    from gcp_storage_emulator import server as emulator
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects

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

    decode, read = emulator._decode_raw_data, emulator._read_data

    def remember(raw: Any, handler: Any) -> Any:
        handler.decoded = decode(raw, handler)
        return handler.decoded

    def with_exact_content(handler: Any, query: Any) -> Any:
        data = read(handler, query)
        if isinstance(data, dict) and "content" in data:
            data["content"] = second_part(handler.decoded)
        if data is None and handler.headers.get("Content-Length") == "0":
            return b""  # an upload of an empty object
        return data

    listing = objects.ls

    def between(request: Any, response: Any, storage: Any, *arguments: Any, **options: Any) -> None:
        listing(request, response, storage, *arguments, **options)
        first, last = (request.query.get(name, [""])[0] for name in ("startOffset", "endOffset"))
        if response.status == HTTPStatus.OK and (first or last):
            found = json.loads(response._content)
            items = [one for one in found["items"] if one["name"] >= first and (not last or one["name"] < last)]
            response.json(found | {"items": items})

    for _, methods in emulator.HANDLERS:
        if isinstance(methods, dict) and methods.get("GET") is listing:
            methods["GET"] = between
    emulator._decode_raw_data, emulator._read_data = remember, with_exact_content
    for name in ("_multipart_upload", "_media_upload"):
        setattr(objects, name, with_precondition(getattr(objects, name)))
    server = emulator.create_server(
        "127.0.0.1", 0, False, BUCKET, data_dir=folder
    )  # a port that nobody can take meanwhile
    server.start()
    print(f"{READY}{server._api._httpd.server_port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    serve(sys.argv[1])
