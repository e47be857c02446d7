"""Requests to Google's APIs: what is repeated, how long the pauses are, and the cloud's clock."""

from collections.abc import Mapping
from typing import Any

import pytest

from forerun.cloud.google.api_error import ApiError
from forerun.cloud.google.rest import TRIES, Endpoints, Rest
from forerun.cloud.provider import CloudUnavailable
from forerun.errors import UserError

ENDPOINTS = Endpoints({"tpu": "http://tpu.test/", "compute": "http://compute.test/compute/v1/"})
NOON, DATE = 1_795_003_200.0, "Wed, 18 Nov 2026 12:00:00 GMT"


class ScriptedAnswer:
    def __init__(self, status: int, content: Any = None, headers: Mapping[str, str] | None = None) -> None:
        self.status_code, self._content, self.headers = status, content, dict(headers or {})

    def json(self) -> Any:
        if isinstance(self._content, Exception):
            raise self._content
        return self._content


class ScriptedSession:
    """Answers with the steps of a script, in their order, and repeats the last one."""

    def __init__(self, *steps: ScriptedAnswer | Exception) -> None:
        self.steps, self.sent = list(steps), []

    def request(self, method: str, url: str, **values: Any) -> ScriptedAnswer:
        self.sent.append((method, url, values.get("json"), values.get("params")))
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        return step


class Time:
    """A local time that only the test changes."""

    def __init__(self) -> None:
        self.now, self.pauses = 1000.0, []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def elapsed(self) -> float:
        return self.now


def rest_of(*steps: ScriptedAnswer | Exception, jitter: float = 1.0) -> tuple[Rest, ScriptedSession, Time]:
    session, time = ScriptedSession(*steps), Time()
    rest = Rest("p", session, ENDPOINTS, sleep=time.sleep, elapsed=time.elapsed, jitter=lambda: jitter)
    return rest, session, time


def google_error(status: int, name: str, message: str, reason: str = "") -> ScriptedAnswer:
    details = [{"reason": reason}] if reason else []
    return ScriptedAnswer(status, {"error": {"code": status, "status": name, "message": message, "details": details}})


OK = ScriptedAnswer(200, {"name": "x"})


def test_a_request_has_its_method_address_body_and_parameters() -> None:
    rest, session, _ = rest_of(OK)
    assert rest.call("POST", "compute", "projects/p/zones", {"a": 1}, {"requestId": "7"}) == {"name": "x"}
    assert session.sent == [("POST", "http://compute.test/compute/v1/projects/p/zones", {"a": 1}, {"requestId": "7"})]
    described = rest.description("POST", "compute", "projects/p/zones", {"a": 1}, {"requestId": "7"})
    assert described == rest.log[0]
    assert described["url"] == "http://compute.test/compute/v1/projects/p/zones?requestId=7"


@pytest.mark.parametrize(
    "failure",
    [
        google_error(
            429, "RESOURCE_EXHAUSTED", "Quota exceeded for 'CreateNode requests per minute'", "RATE_LIMIT_EXCEEDED"
        ),
        google_error(500, "INTERNAL", "internal"),
        ScriptedAnswer(502, ValueError("a page, not JSON")),
        google_error(503, "UNAVAILABLE", "try later"),
        google_error(504, "DEADLINE_EXCEEDED", "late"),
        ScriptedAnswer(429, {}),
        ScriptedAnswer(
            403, {"error": {"code": 403, "message": "Rate Limit", "errors": [{"reason": "rateLimitExceeded"}]}}
        ),
        ScriptedAnswer(200, ValueError("truncated")),
        ConnectionResetError("lost"),
        TimeoutError("late"),
    ],
)
def test_what_may_pass_is_repeated_with_the_same_request(failure: ScriptedAnswer | Exception) -> None:
    rest, session, time = rest_of(failure, failure, OK)
    assert rest.call("POST", "tpu", "v2/nodes", {"a": 1}, {"nodeId": "n"}) == {"name": "x"}
    assert len(session.sent) == 3
    assert len({str(one) for one in session.sent}) == 1
    assert time.pauses == [0.5, 1.0]


@pytest.mark.parametrize(
    ("status", "name", "message"),
    [
        (400, "INVALID_ARGUMENT", "invalid AcceleratorType"),
        (404, "NOT_FOUND", "Resource 'x' was not found"),
        (409, "ALREADY_EXISTS", "Resource 'x' already exists"),
        (429, "RESOURCE_EXHAUSTED", 'There is no more capacity in the zone "z"'),
        (429, "RESOURCE_EXHAUSTED", "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded."),
        (403, "PERMISSION_DENIED", "The caller does not have permission"),
    ],
)
def test_what_cannot_pass_is_not_repeated(status: int, name: str, message: str) -> None:
    rest, session, time = rest_of(google_error(status, name, message, "RATE_LIMIT_EXCEEDED" if status == 429 else ""))
    with pytest.raises(ApiError) as caught:
        rest.call("GET", "tpu", "v2/x")
    assert (caught.value.status, caught.value.message) == (status, message)
    assert (len(session.sent), time.pauses) == (1, [])


def test_it_gives_up_after_some_tries() -> None:
    rest, session, time = rest_of(google_error(503, "UNAVAILABLE", "no"), jitter=0.0)
    with pytest.raises(CloudUnavailable):
        rest.call("GET", "tpu", "v2/x")
    assert len(session.sent) == TRIES
    assert time.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("header", "pause"), [("7", 7.0), ("Wed, 18 Nov 2026 12:00:09 GMT", 9.0), ("3600", 30.0), ("soon", 0.5)]
)
def test_the_pause_is_at_least_what_the_api_asks_for(header: str, pause: float) -> None:
    rest, _, time = rest_of(ScriptedAnswer(503, {}, {"Retry-After": header, "Date": DATE}), OK)
    rest.call("GET", "tpu", "v2/x")
    assert time.pauses == [pause]


def test_all_pages_of_a_list_are_read() -> None:
    rest, session, _ = rest_of(
        ScriptedAnswer(200, {"nodes": [1], "nextPageToken": "t"}), ScriptedAnswer(200, {"nodes": [2]})
    )
    assert [page["nodes"] for page in rest.pages("tpu", "v2/nodes", {"pageSize": "1"})] == [[1], [2]]
    assert [sent[3] for sent in session.sent] == [{"pageSize": "1"}, {"pageSize": "1", "pageToken": "t"}]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (google_error(401, "UNAUTHENTICATED", "invalid credentials"), "E-CLOUD-014"),
        (google_error(403, "PERMISSION_DENIED", "disabled", "SERVICE_DISABLED"), "E-CLOUD-013"),
        (google_error(403, "PERMISSION_DENIED", "Cloud TPU API has not been used in project 1 before"), "E-CLOUD-013"),
    ],
)
def test_what_the_user_must_fix_has_a_code(answer: ScriptedAnswer, code: str) -> None:
    rest, _, _ = rest_of(answer)
    with pytest.raises(UserError) as caught:
        rest.call("GET", "tpu", "v2/x")
    assert caught.value.code == code


def test_the_time_is_the_clouds() -> None:
    rest, session, time = rest_of(ScriptedAnswer(404, {}, {"Date": DATE}))
    assert rest.now() == NOON
    time.now += 4
    assert rest.now() == NOON + 4
    assert len(session.sent) == 1
    time.now += 2  # older than 5 s: ask again
    assert rest.now() == NOON
    assert len(session.sent) == 2
    # An error of the API also sets the clock.
    time.now += 60
    with pytest.raises(ApiError):
        rest.call("GET", "tpu", "v2/x")
    assert rest.now() == NOON
    assert len(session.sent) == 3


def test_the_time_continues_without_answers() -> None:
    rest, _, time = rest_of(ScriptedAnswer(200, {}, {"Date": DATE}), ConnectionError("down"))
    rest.call("GET", "tpu", "v2/x")
    time.now += 600
    assert rest.now() == NOON + 600


def test_there_is_no_time_before_the_first_answer() -> None:
    rest, _, _ = rest_of(ConnectionError("down"))
    with pytest.raises(CloudUnavailable):
        rest.now()
