"""Credentials, projects and addresses from the environment."""

from pathlib import Path
from typing import Any

import pytest

from forerun.cloud.google.clock import seconds_of
from forerun.cloud.google.credentials import GoogleSession, google_session
from forerun.cloud.google.rest import endpoints_from
from forerun.errors import UserError

OVERRIDE = {"CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": "http://127.0.0.1:1", "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "1"}


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the credentials of this machine, and its metadata server."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


def test_an_override_replaces_the_base_address() -> None:
    found = endpoints_from({"CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": "http://127.0.0.1:1/compute/v1/"})
    assert found.url("compute", "projects/p") == "http://127.0.0.1:1/compute/v1/projects/p"
    assert found.url("tpu", "v2/projects/p") == "https://tpu.googleapis.com/v2/projects/p"
    assert found.overridden == {"compute"}


@pytest.mark.parametrize(
    ("given", "environment", "project"),
    [
        ("mine", {"GOOGLE_CLOUD_PROJECT": "a", "CLOUDSDK_CORE_PROJECT": "b"}, "mine"),
        (None, {"GOOGLE_CLOUD_PROJECT": "a", "CLOUDSDK_CORE_PROJECT": "b"}, "a"),
        (None, {"CLOUDSDK_CORE_PROJECT": "b"}, "b"),
    ],
)
def test_the_project_is_the_first_that_is_given(given: str | None, environment: dict[str, str], project: str) -> None:
    variables = OVERRIDE | environment
    session, found = google_session(variables, endpoints_from(variables), given)
    assert found == project
    session.close()


def test_without_a_project_nothing_is_sent() -> None:
    with pytest.raises(UserError) as caught:
        google_session(OVERRIDE, endpoints_from(OVERRIDE))
    assert caught.value.code == "E-CLOUD-015"


def test_anonymous_requests_never_go_to_google() -> None:
    variables = {"CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "1", "GOOGLE_CLOUD_PROJECT": "p"}
    with pytest.raises(UserError) as caught:
        google_session(variables, endpoints_from(variables))
    assert caught.value.code == "E-CLOUD-011"


class Credentials:
    """Credentials of google-auth whose refresh fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def before_request(self, *arguments: Any) -> None:
        raise self.error


def test_an_expired_login_is_for_the_user_and_a_lost_token_server_is_not() -> None:
    from google.auth.exceptions import RefreshError, TransportError

    for error, kind in [
        (RefreshError("Reauthentication is needed"), UserError),
        (RefreshError("try later", retryable=True), OSError),
        (TransportError("down"), OSError),
    ]:
        session = GoogleSession(Credentials(error))
        with pytest.raises(kind) as caught:
            session.request("GET", "http://127.0.0.1:1/")
        assert kind is OSError or caught.value.code == "E-CLOUD-012"
        session.close()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-11-18T12:00:00Z", 1_795_003_200.0),
        ("2026-11-18T12:00:00.250000000Z", 1_795_003_200.25),
        ("2026-11-18T12:00:00.5Z", 1_795_003_200.5),
        ("2026-11-18T04:00:00.000-08:00", 1_795_003_200.0),
        ("yesterday", None),
        (None, None),
    ],
)
def test_timestamps_have_up_to_nine_digits(text: str | None, seconds: float | None) -> None:
    assert seconds_of(text) == seconds
