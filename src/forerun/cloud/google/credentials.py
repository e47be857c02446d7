"""Credentials of Google Cloud: application default credentials, and the project that they belong to."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.cloud.google.rest import Answer, Endpoints, Params
from forerun.errors import UserError

SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
MOST_BYTES, MOST_SECONDS, CHUNK_BYTES = 64 << 20, 60.0, 1 << 20  # of one answer
ANONYMOUS = "CLOUDSDK_AUTH_DISABLE_CREDENTIALS"
PROJECT_VARIABLES = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")


@dataclass(frozen=True)
class ReceivedAnswer:
    """A complete answer."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.content)
        except RecursionError as error:
            raise ValueError("the answer is nested too deeply") from error


class GoogleSession:
    """A session of google-auth whose exceptions have the meaning that `Session` defines.

    It follows no redirects, which these APIs do not send. The size and the total time of an answer are limited.
    """

    def __init__(self, credentials: Any) -> None:
        from google.auth.transport.requests import AuthorizedSession

        self._session = AuthorizedSession(credentials)
        names = ("service_account_email", "signer_email", "account")
        self.account = next((str(value) for name in names if (value := getattr(credentials, name, None))), "")

    def request(
        self, method: str, url: str, *, json: Any = None, params: Params | None = None, timeout: Any = None
    ) -> Answer:
        from google.auth.exceptions import GoogleAuthError, TransportError

        try:
            answer = self._session.request(
                method, url, json=json, params=params, timeout=timeout, stream=True, allow_redirects=False
            )
            with answer:
                return ReceivedAnswer(answer.status_code, answer.headers, _content(answer))
        except TransportError as error:  # the token server does not answer
            raise ConnectionError(str(error)) from error
        except GoogleAuthError as error:
            if getattr(error, "retryable", False):
                raise ConnectionError(str(error)) from error
            raise UserError(
                "E-CLOUD-012",
                "the credentials for Google Cloud cannot be refreshed",
                why=str(error),
                fix="sign in again: gcloud auth application-default login",
            ) from error

    def close(self) -> None:
        self._session.close()


def _content(answer: Any) -> bytes:
    """Return the content of an answer. Raise ConnectionError if it is too large or takes too long."""
    from urllib3.exceptions import HTTPError

    content, until = bytearray(), time.monotonic() + MOST_SECONDS
    try:
        # Unlike `read`, `read1` of urllib3 2 returns the bytes that have arrived: a slow server cannot delay the check.
        read = getattr(answer.raw, "read1", answer.raw.read)
        while chunk := read(CHUNK_BYTES, decode_content=True):
            content += chunk
            if len(content) > MOST_BYTES or time.monotonic() > until:
                raise ConnectionError(f"the answer has more than {MOST_BYTES >> 20} MiB or takes {MOST_SECONDS:.0f} s")
    except HTTPError as error:  # lost or truncated
        raise ConnectionError(str(error)) from error
    return bytes(content)


def google_session(
    environment: Mapping[str, str], endpoints: Endpoints, project: str | None = None
) -> tuple[GoogleSession, str]:
    """Return a session with the default credentials, and the project.

    The project is `project`, else one of the variables `PROJECT_VARIABLES`, else that of the credentials.

    Raises:
      UserError: There are no credentials or no project, or google-auth is not installed.
    """
    try:
        import google.auth
        import google.auth.credentials
        import requests  # noqa: F401  (google-auth needs it for its sessions)
    except ImportError as error:
        raise UserError(
            "E-CLOUD-010",
            "Google Cloud needs packages that are not installed",
            why=f"import failed: {error}",
            fix='pip install ".[cloud]"',
        ) from error
    chosen = project or next((environment[name] for name in PROJECT_VARIABLES if environment.get(name)), None)
    # Anonymous requests make sense only for a test server. Google's own servers would answer 401 to each of them.
    if endpoints.overridden and environment.get(ANONYMOUS, "").lower() in ("1", "true"):
        credentials: Any = google.auth.credentials.AnonymousCredentials()
    else:
        credentials, found = _default_credentials()
        chosen = chosen or found
    if not chosen:
        raise UserError(
            "E-CLOUD-015",
            "no Google Cloud project is selected",
            why=f"no --project, none of {', '.join(PROJECT_VARIABLES)} is set, and the credentials name no project",
            fix="add --project MY-PROJECT, or: export GOOGLE_CLOUD_PROJECT=MY-PROJECT",
        )
    return GoogleSession(credentials), chosen


def _default_credentials() -> tuple[Any, str | None]:
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    try:
        credentials, project = google.auth.default(scopes=SCOPES)
    except DefaultCredentialsError as error:
        raise UserError(
            "E-CLOUD-011",
            "there are no credentials for Google Cloud",
            why=str(error),
            fix="sign in: gcloud auth application-default login",
        ) from error
    return credentials, project
