"""Requests to Google's REST APIs, with repetition of what may pass."""

from __future__ import annotations

import contextlib
import email.utils
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlencode

from forerun.cloud.google.answer_shape import AnyAnswer, shape_problem
from forerun.cloud.google.api_error import ApiError, error_of, may_pass
from forerun.cloud.google.clock import CloudClock, elapsed_seconds
from forerun.cloud.provider import ApiDisabled, CloudUnavailable
from forerun.errors import UserError

# The value replaces the complete base address, as in gcloud: for Compute Engine it includes `compute/v1/`.
BASES: Mapping[str, str] = {
    "tpu": "https://tpu.googleapis.com/",
    "compute": "https://compute.googleapis.com/compute/v1/",
    "cloudresourcemanager": "https://cloudresourcemanager.googleapis.com/",
    "serviceusage": "https://serviceusage.googleapis.com/",
    "iam": "https://iam.googleapis.com/",
    "storage": "https://storage.googleapis.com/storage/v1/",
}
OVERRIDE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"


@dataclass(frozen=True)
class Endpoints:
    """The base address of each API by its name, and the names of those that the environment overrides."""

    bases: Mapping[str, str] = field(default_factory=lambda: dict(BASES))
    overridden: frozenset[str] = frozenset()

    def url(self, api: str, path: str) -> str:
        """Return the address of a path such as `v2/projects/p/locations`, which starts with no slash."""
        return self.bases[api] + path


def endpoints_from(environment: Mapping[str, str]) -> Endpoints:
    """Return the endpoints that the variables `CLOUDSDK_API_ENDPOINT_OVERRIDES_<API>` select."""
    overrides = {api: environment.get(OVERRIDE + api.upper(), "") for api in BASES}
    chosen = {api: base.rstrip("/") + "/" for api, base in overrides.items() if base}
    return Endpoints({**BASES, **chosen}, frozenset(chosen))


Params = Mapping[str, str | Sequence[str]]  # a list repeats its parameter
TRIES = 7
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 5.0, 1800.0
MOST_PAGES = 1000
_LOGGED_REQUESTS = 1000
# A name from an answer or a record must not turn a path into that of another resource.
_WRONG_PATH = re.compile(r"[\x00-\x20\x7f?#%\\]|(^|/)\.\.?(/|$)")


class Answer(Protocol):
    """The part of `requests.Response` that is used here."""

    @property
    def status_code(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    def json(self) -> Any: ...


class Session(Protocol):
    """The part of `requests.Session` that is used here. It adds the credentials to each request.

    It raises OSError (as `requests` does) if no answer arrives, and UserError if the credentials are not valid.
    """

    def request(
        self, method: str, url: str, *, json: Any = None, params: Params | None = None, timeout: Any = None
    ) -> Answer: ...


class Rest:
    """Sends requests and returns their answers as dictionaries.

    Every request may be repeated: names and request IDs make repetitions idempotent. A repeated creation whose first
    answer was lost ends with ALREADY_EXISTS, and a repeated deletion with NOT_FOUND; callers treat both as success.

    Args:
      clock_api: the API whose answers set the clock if no request was sent for some seconds.
      sleep: waits between repetitions.
    """

    def __init__(
        self,
        project: str,
        session: Session,
        endpoints: Endpoints,
        *,
        clock_api: str = "tpu",
        sleep: Callable[[float], None] = time.sleep,
        elapsed: Callable[[], float] = elapsed_seconds,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.project = project
        self.endpoints = endpoints
        self.clock = CloudClock()
        self.sleep = sleep
        self.log: deque[dict[str, object]] = deque(maxlen=_LOGGED_REQUESTS)
        self._session = session
        self._clock_api = clock_api
        self._elapsed = elapsed
        self._jitter = jitter

    @property
    def account(self) -> str:
        """Return the account of the credentials, or an empty string if they do not name it."""
        return str(getattr(self._session, "account", ""))

    def call(
        self,
        method: str,
        api: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Params | None = None,
        shape: Any = AnyAnswer,
    ) -> dict[str, Any]:
        """Send a request and return the answer. `path` follows the base address, such as `v2/projects/p/locations`.

        Args:
          shape: the TypedDict that the answer must have.

        Raises:
          ApiError: The API refused the request.
          CloudUnavailable: No usable answer after several tries, or an answer of another shape.
        """
        if _WRONG_PATH.search(path):
            raise CloudUnavailable(f"{path!r} is not the path of a resource")
        url = self.endpoints.url(api, path)
        problem = ""
        for tried in range(1, TRIES + 1):
            self.log.append({"method": method, "url": _with_params(url, params), "body": body})
            try:
                answer = self._session.request(method, url, json=body, params=params, timeout=(10.0, 60.0))
                self.clock.observe(answer.headers.get("Date"), self._elapsed())
                content = _content(answer)
            except (OSError, ValueError) as error:  # lost, late or truncated answer
                problem, retry_after = f"{type(error).__name__}: {error}", None
            else:
                if 200 <= answer.status_code < 300:
                    return _shaped(content, shape, f"{method} {url}")
                if answer.status_code < 400:
                    raise CloudUnavailable(
                        f"{method} {url}: HTTP status {answer.status_code}; redirects are not followed"
                    )
                refused = error_of(answer.status_code, content)
                _raise_disabled_api(refused, self.project)
                if not may_pass(refused):
                    raise refused
                problem, retry_after = (
                    f"HTTP status {answer.status_code}: {refused.message}",
                    answer.headers.get("Retry-After"),
                )
            if tried < TRIES:
                self.sleep(self._pause(tried, retry_after))
        raise CloudUnavailable(f"{method} {url} failed {TRIES} times; last: {problem}")

    def pages(
        self, api: str, path: str, params: Params | None = None, shape: Any = AnyAnswer
    ) -> Iterator[dict[str, Any]]:
        """Yield all pages of a list, whose shape is `shape`. Raise CloudUnavailable if the list does not end."""
        token, tokens = "", set[str]()
        while True:
            of_page = {**(params or {}), **({"pageToken": token} if token else {})}
            page = self.call("GET", api, path, params=of_page, shape=shape)
            yield page
            token = str(page.get("nextPageToken") or "")
            if not token:
                return
            if token in tokens or len(tokens) >= MOST_PAGES:
                raise CloudUnavailable(f"the list {self.endpoints.url(api, path)} does not end: page {len(tokens) + 2}")
            tokens.add(token)

    def now(self) -> float:
        """Return the cloud's time in seconds since 1970. Ask the cloud if its last answer is older than 5 s.

        If the cloud does not answer, the time of its last answer and the time since then are used.

        Raises:
          CloudUnavailable: The cloud has never answered.
        """
        if not self.clock.is_fresh(self._elapsed()):
            with contextlib.suppress(OSError):
                # The answer may be an error. Its header has the time all the same.
                answer = self._session.request("GET", self.endpoints.url(self._clock_api, ""), timeout=(5.0, 10.0))
                self.clock.observe(answer.headers.get("Date"), self._elapsed())
        now = self.clock.now(self._elapsed())
        if now is None:
            raise CloudUnavailable(f"no answer from {self.endpoints.url(self._clock_api, '')}")
        return now

    def description(
        self,
        method: str,
        api: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Params | None = None,
    ) -> dict[str, object]:
        """Return the request that `call` sends, as {method, url, body}. Send nothing."""
        return {"method": method, "url": _with_params(self.endpoints.url(api, path), params), "body": body}

    def _pause(self, tried: int, retry_after: str | None) -> float:
        """Return the seconds before the next try: exponential with jitter, and at least what the API asks for."""
        longest = min(FIRST_PAUSE_SECONDS * 2.0 ** (tried - 1), LONGEST_PAUSE_SECONDS)
        pause = longest * (0.5 + 0.5 * self._jitter())
        return max(pause, min(_seconds(retry_after, self.clock.now(self._elapsed())), LONGEST_PAUSE_SECONDS))


class PollPauses:
    """The pauses of one wait: short at first, then at most 5 s, and 30 minutes in total."""

    def __init__(self, rest: Rest, what: str) -> None:
        self._rest, self._what = rest, what
        self._pause, self._waited = FIRST_POLL_SECONDS, 0.0

    def pause(self) -> None:
        if self._waited >= LONGEST_WAIT_SECONDS:
            raise CloudUnavailable(f"{self._what} is not complete after {LONGEST_WAIT_SECONDS / 60:.0f} minutes")
        self._rest.sleep(self._pause)
        self._waited += self._pause
        self._pause = min(self._pause * 1.5, LONGEST_POLL_SECONDS)


def _shaped(content: object, shape: Any, request: str) -> dict[str, Any]:
    if problem := shape_problem(content, shape):
        raise CloudUnavailable(f"{request}: the answer has another shape; {problem}")
    assert isinstance(content, dict)
    return content


def _with_params(url: str, params: Params | None) -> str:
    return f"{url}?{urlencode(params, doseq=True)}" if params else url


def _content(answer: Answer) -> object:
    """Return the JSON of an answer. An error page that is not JSON has its status all the same."""
    try:
        return answer.json()
    except ValueError:
        if answer.status_code >= 400 or answer.status_code == 204:
            return {}
        raise


def _seconds(retry_after: str | None, now: float | None) -> float:
    """Return the value of a `Retry-After` header: a number of seconds, or a date."""
    if not retry_after:
        return 0.0
    try:
        return max(float(retry_after), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(retry_after).timestamp() - (now or 0.0), 0.0) if now else 0.0
    except ValueError:
        return 0.0


def _raise_disabled_api(error: ApiError, project: str) -> None:
    text = error.message.lower()
    if error.status == 403 and (
        error.reason in ("SERVICE_DISABLED", "accessNotConfigured") or "has not been used in project" in text
    ):
        raise ApiDisabled(
            "E-CLOUD-013",
            f"an API is not enabled in the project {project}",
            why=error.message,
            fix="gcloud services enable tpu.googleapis.com compute.googleapis.com storage.googleapis.com"
            f" --project {project}",
        )
    if error.status == 401:
        raise UserError(
            "E-CLOUD-014",
            "Google Cloud does not accept the credentials",
            why=error.message,
            fix="sign in again: gcloud auth application-default login",
        )
