"""The start of an agent on a real host: its index, its provider and the notices of its metadata server."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from forerun.cloud.host.agent import Agent, AgentTimes, SliceApi
from forerun.cloud.host.settings import AgentSettings, HostLayout, read_settings
from forerun.cloud.provider import SliceStatus
from forerun.cloud.record.run_files import RunFiles
from forerun.errors import UserError
from forerun.hardware import maintenance_notice
from forerun.hardware.tpu_hosts import find_tpu_hosts
from forerun.reporter import LogReporter

SSH = "ssh"  # the provider of machines that belong to the user
NOTICE_SECONDS = 1.0


def start_agent(settings_file: Path, root: Path, speed: float) -> int:
    """Run the agent of this host to its end, and return its exit code."""
    settings = read_settings(settings_file)
    notice = NoticeWatch(settings.provider != SSH, NOTICE_SECONDS / speed)
    agent = Agent(
        settings,
        HostLayout(root),
        RunFiles(settings.folder),
        host_index(settings),
        api_of(settings),
        notice.reason,
        LogReporter(),
        AgentTimes(speed=speed),
    )
    return agent.run()


def host_index(settings: AgentSettings) -> int:
    """Return the index of this host among those of the run."""
    if settings.host is not None:
        return settings.host
    if settings.hosts == 1:
        return 0
    found = find_tpu_hosts()
    if found is None or found.count != settings.hosts:
        count = "none" if found is None else found.count
        raise UserError(
            "E-CLOUD-041",
            f"the agent does not find the index of this host among {settings.hosts} hosts",
            why=f"the environment and the metadata server name {count} hosts",
            fix="delete the slice with forerun down NAME, and start the run again",
        )
    return found.number


def api_of(settings: AgentSettings) -> SliceApi | None:
    """Return the API that deletes this slice; None for machines of the user."""
    return None if settings.provider == SSH else ProviderApi(settings.provider, settings.project)


class ProviderApi:
    """A provider that is made at its first use.

    Its credentials come from a server. If that does not answer, only the call fails: the agent still stops training.
    """

    def __init__(self, name: str, project: str | None) -> None:
        self._name, self._project = name, project
        self._lock = threading.Lock()
        self._made: SliceApi | None = None

    def _provider(self) -> SliceApi:
        from forerun.cloud.providers import provider_named

        with self._lock:
            if self._made is None:
                self._made = provider_named(self._name, self._project)
            return self._made

    def now(self) -> float:
        return self._provider().now()

    def status(self, name: str, zone: str) -> SliceStatus:
        return self._provider().status(name, zone)

    def delete(self, name: str, zone: str) -> float | None:
        return self._provider().delete(name, zone)


class NoticeWatch:
    """Follows the notices of the metadata server in its own thread, because an answer may take two seconds."""

    def __init__(self, is_cloud: bool, every_seconds: float) -> None:
        self._reason = ""
        self._every_seconds = every_seconds
        if is_cloud:
            threading.Thread(target=self._work, name="notice", daemon=True).start()

    def reason(self) -> str:
        """Return why the cloud will end this machine, or an empty string."""
        return self._reason

    def _work(self) -> None:
        while not self._reason:
            try:
                notice = maintenance_notice.announced(maintenance_notice.metadata_url())
            except Exception as error:  # nothing ends this thread
                LogReporter().info(f"notice: {type(error).__name__}: {error}")
                notice = None
            if notice is not None:
                self._reason = notice[0]
            time.sleep(self._every_seconds)
