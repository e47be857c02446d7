"""The tracker of MLflow. It uses five routes of the REST interface of a server.

The package `mlflow` is not needed: its client takes 115 ms for a call, and it depends on a web server.

A batch of rows can be sent twice, because MLflow treats metrics with equal key, value, time and step as one metric. The
run is found by a tag with its token, so a lost response does not create a second run.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.config.addresses import check_addresses
from forerun.errors import JobValueError, UserError
from forerun.redirects import RedirectHandler
from forerun.track.backends.tensorboard import figures_of
from forerun.track.tracker import Row, TrackedRun

ANSWER_SECONDS = 10.0
MAX_METRICS = 900  # per batch; MLflow accepts 1,000
MAX_PARAMS = 100
TAG = "forerun.token"
_OPENER = urllib.request.build_opener(RedirectHandler)


class Refused(OSError):
    """A response of the server that reports an error or is not JSON."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"HTTP {code}: {text}")
        self.code = code


def server_of(url: str | None) -> str:
    """Return the address of the server, from `url` or from MLFLOW_TRACKING_URI.

    Raises:
        UserError: There is no address, or it contains a credential.
    """
    found = url or os.environ.get("MLFLOW_TRACKING_URI", "")
    if urllib.parse.urlsplit(found).scheme not in ("http", "https"):
        raise UserError(
            "E-TRACK-001",
            "track.to: mlflow needs the address of a server",
            why=f"track.url is {url!r}, MLFLOW_TRACKING_URI {os.environ.get('MLFLOW_TRACKING_URI')!r}",
            fix="set track.url=http://host:5000, or the variable",
        )
    try:
        check_addresses(found, "track.url")  # also for the variable, because errors of urllib show passwords
    except JobValueError as error:
        raise UserError(
            "E-TRACK-002",
            f"the address of the MLflow server is rejected: {error.what}",
            why="the address is in MLFLOW_TRACKING_URI",
            fix=f"change the variable: {error.fix}",
        ) from None
    return found.rstrip("/")


class Mlflow:
    """A run on an MLflow server.

    Credentials come from MLflow's own variables (MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD). They are never
    printed.
    """

    def __init__(self, server: str, experiment: str) -> None:
        self._server, self._experiment = server, experiment
        self._id = self._run = ""

    def begin(self, run: TrackedRun) -> int | None:
        """Find or create the run on the server, and return its last step, or 0."""
        self._id = self._id or self._experiment_id()
        search = {"experiment_ids": [self._id], "filter": f"tags.`{TAG}` = '{run.token}'", "max_results": 1}
        found = self._ask("runs/search", search).get("runs", [])
        tags = [{"key": TAG, "value": run.token}, {"key": "mlflow.source.name", "value": "forerun"}]
        body = {"experiment_id": self._id, "run_name": run.name, "tags": tags}
        about = found[0] if found else self._ask("runs/create", body)["run"]
        self._run, data = about["info"]["run_id"], about.get("data", {})
        if not data.get("params"):
            params = [{"key": key, "value": str(value)[:500]} for key, value in run.job.items()]
            for start in range(0, len(params), MAX_PARAMS):
                self._ask("runs/log-batch", {"run_id": self._run, "params": params[start : start + MAX_PARAMS]})
        return max((int(metric.get("step", 0)) for metric in data.get("metrics", ())), default=0)

    def send(self, rows: Sequence[Row]) -> None:
        metrics: list[dict[str, Any]] = []
        for row in rows:
            about = {"timestamp": round(row["unix_seconds"] * 1000), "step": row["step"]}
            more = [{"key": key, "value": value, **about} for key, value in figures_of(row).items()]
            if len(metrics) + len(more) > MAX_METRICS:
                self._ask("runs/log-batch", {"run_id": self._run, "metrics": metrics})
                metrics = []
            metrics += more
        if metrics:  # rows of skipped steps contain no numbers
            self._ask("runs/log-batch", {"run_id": self._run, "metrics": metrics})

    def end(self, finished: bool) -> None:
        """Set the status of the run to FINISHED or KILLED."""
        if self._run:
            self._ask("runs/update", {"run_id": self._run, "status": "FINISHED" if finished else "KILLED"})

    def _experiment_id(self) -> str:
        """Return the identifier of the experiment. Create the experiment if it does not exist."""
        name = {"experiment_name": self._experiment}
        for _ in range(2):  # the second time if another run creates it meanwhile
            try:
                return str(self._ask("experiments/get-by-name", name, get=True)["experiment"]["experiment_id"])
            except Refused as error:
                if error.code != 404:
                    raise
            try:
                return str(self._ask("experiments/create", {"name": self._experiment})["experiment_id"])
            except Refused as error:
                if error.code != 400:
                    raise
        raise Refused(404, f"experiment {self._experiment!r} can be neither found nor created")

    def _ask(self, route: str, body: Mapping[str, Any], *, get: bool = False) -> dict[str, Any]:
        """Send a request and return the JSON object of the response. Raise Refused if the server reports an error."""
        address = f"{self._server}/api/2.0/mlflow/{route}"
        headers = {"Content-Type": "application/json", **_authorization()}
        if get:
            request = urllib.request.Request(f"{address}?{urllib.parse.urlencode(body)}", headers=headers)
        else:
            request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        try:
            with _OPENER.open(request, timeout=ANSWER_SECONDS) as answer:
                return dict(json.loads(answer.read() or b"{}"))
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, error.read(200).decode(errors="replace").replace("\n", " ")) from error
        except UserError as error:
            raise Refused(302, f"{error.what}: {error.why}") from error
        except ValueError as error:
            raise Refused(200, "the response is not JSON: is this an MLflow server?") from error


def _authorization() -> dict[str, str]:
    """Return the HTTP header with the credentials, or no header without them."""
    token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
    if token:
        return {"Authorization": f"Bearer {token}"}
    if user:
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}
