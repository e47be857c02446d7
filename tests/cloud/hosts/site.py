"""A cloud for one test: the fake APIs with hosts as namespaces, a bucket, and the laptop that forerun runs on.

with cloud_site(folder) as site:
    done = site.forerun("run", "job.yaml", "--on", "v6e-16", "--yes")
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from fake.process import FakeCloud

from forerun.cloud.setup.requirements import locked_requirements, uv_requirement

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
PACKAGES = REPOSITORY / ".cache" / "hosts"
# Programs there run for milliseconds and compile for seconds. Four hosts share the cores of this machine.
QUICKLY = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
    " --xla_cpu_collective_call_terminate_timeout_seconds=900",
}
if version("jaxlib").startswith("0.10."):
    QUICKLY["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"  # needs a third of the time
# What the machine that starts the tests has set for itself, and a user's laptop has not.
OWN = ("PYTHONPATH", "FORERUN", "CLOUDSDK", "GOOGLE", "GCE_", "TPU_", "XLA_", "JAX_", "ALLOW_MULTIPLE")


@dataclass
class Site:
    """A cloud and a laptop.

    Attributes:
      folder: of this test. `laptop` in it is the current folder of the commands.
      environment: of the commands on the laptop.
      bucket: the address of the bucket, such as `gs://checkpoints`.
      objects: the folder with the bucket's objects.
    """

    folder: Path
    cloud: FakeCloud
    environment: dict[str, str]
    bucket: str
    objects: Path
    shared: Path

    @property
    def laptop(self) -> Path:
        return self.folder / "laptop"

    def forerun(self, *arguments: str, seconds: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the laptop."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.laptop,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )

    @contextmanager
    def started(self, *arguments: str, **variables: str) -> Iterator[Command]:
        """Start a command on the laptop, and kill it at the end of the block if it still runs."""
        log = self.folder / f"{arguments[0]}-{time.monotonic_ns()}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(*arguments),
                cwd=self.laptop,
                env=self.environment | {"PYTHONUNBUFFERED": "1"} | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Command(process, log)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "forerun", *arguments]

    def object_names(self) -> list[str]:
        """Return the names of all objects of the bucket."""
        root = self.objects / self.bucket.removeprefix("gs://")
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())

    def read(self, name: str) -> bytes:
        return (self.objects / self.bucket.removeprefix("gs://") / name).read_bytes()

    def hold_at(self, step: int) -> None:
        """Let every training wait before this step, until `release`."""
        held = {"first": step, "last": 1 << 40, "step_seconds": 3600.0}
        (self.shared / "brake.json").write_text(json.dumps(held))

    def release(self) -> None:
        (self.shared / "brake.json").unlink(missing_ok=True)

    def logs(self) -> str:
        """Return what the hosts have written, for the message of a failed test."""
        found = []
        for path in sorted((self.folder / "hosts").glob("*/console.log")):
            found.append(f"--- {path.parent.name}: console\n{path.read_text(errors='replace')[-2000:]}")
            for name in ("startup.log", "train.log", "agent.log"):
                log = path.parent / "changes/var/log/forerun" / name
                if log.exists():
                    found.append(f"--- {path.parent.name}: {name}\n{log.read_text(errors='replace')[-4000:]}")
        return "\n".join(found)

    def host_folders(self) -> list[Path]:
        """Return the changed files of each host that ever ran, as folders that mirror its `/`."""
        return sorted(path.parent / "changes" for path in (self.folder / "hosts").glob("*/host.json"))


@dataclass
class Command:
    """A command that runs on the laptop."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, condition: Callable[[], object], site: Site, what: str, seconds: float = 900) -> None:
        """Wait for a condition. Fail with all logs if it does not come true, or if the command ends before."""
        end = time.monotonic() + seconds
        while not condition():
            code = self.process.poll()
            if code is not None and not condition():
                raise AssertionError(f"exit code {code} before {what}\n{self.output}\n{site.logs()}")
            if time.monotonic() > end:
                raise AssertionError(f"no {what} within {seconds} s\n{self.output}\n{site.logs()}")
            time.sleep(0.05)

    def wait(self, site: Site, seconds: float = 900) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s\n{self.output}\n{site.logs()}") from None


@contextmanager
def cloud_site(folder: Path, *, host_variables: Mapping[str, str] | None = None, **options: Any) -> Iterator[Site]:
    """Start a cloud with real hosts.

    Args:
      host_variables: variables of `/etc/default/forerun` on the hosts.
      options: of `FakeCloud`, such as `speed`.
    """
    warm_packages()
    shared = PACKAGES / f"site-{os.getpid()}-{time.monotonic_ns()}"
    (folder / "laptop").mkdir(parents=True)
    (shared / "brake").mkdir(parents=True)
    shutil.copy(REPOSITORY / "tests/faults/brake/sitecustomize.py", shared / "brake")
    emulator = module_at("gcs_server", REPOSITORY / "tests/support/gcs_server.py")
    try:
        with emulator.bucket(folder / "bucket") as bucket:
            own = {
                **bucket,
                **QUICKLY,
                "FORERUN_SMOKE_SECONDS": "1",
                "UV_CACHE_DIR": str(PACKAGES / "uv"),
                "UV_OFFLINE": "1",
                # All hosts have the same paths, so they can use each other's compiled modules.
                "PYTHONPYCACHEPREFIX": str(PACKAGES / "pyc"),
                # A second slice compiles nothing again. Hosts do not share it: jax does not write it atomically.
                "JAX_COMPILATION_CACHE_DIR": str(PACKAGES / "jax-{host}"),
                "PYTHONPATH": str(shared / "brake"),
                "FORERUN_TEST_BRAKE": str(shared / "brake.json"),
                **(host_variables or {}),
            }
            hosts = {
                "folder": str(folder / "hosts"),
                "environment": own,
                "programs": {"/usr/local/bin/uv": str(PACKAGES / "bin" / "uv")},
                "shared": str(PACKAGES),
                "software": str(shared),
                "project": "forerun-test",
            }
            log = folder / "fake.log"
            with FakeCloud(machines="namespaces", machine_options=hosts, log=log, **options) as cloud:
                environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
                environment |= cloud.environment() | bucket
                environment |= {
                    "PYTHONPATH": str(REPOSITORY / "src"),
                    "XDG_CONFIG_HOME": str(folder / "config"),
                    "TPU_SKIP_MDS_QUERY": "1",
                    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                }
                yield Site(
                    folder, cloud, environment, f"gs://{emulator.BUCKET}", folder / "bucket" / ".cloudstorage", shared
                )
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def warm_packages() -> None:
    """Download the packages of a host once. Hosts then install them from the cache, without a network."""
    PACKAGES.mkdir(parents=True, exist_ok=True)
    locked = locked_requirements("cpu")
    done = PACKAGES / f"warm-{locked.sha256[:16]}"
    with (PACKAGES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return
        (PACKAGES / "uv.txt").write_text(uv_requirement() + "\n")
        quiet = {"check": True, "stdout": subprocess.DEVNULL}
        target = ["--quiet", "--target", str(PACKAGES), "--upgrade", "--require-hashes", "--no-deps"]
        subprocess.run([sys.executable, "-m", "pip", "install", *target, "-r", str(PACKAGES / "uv.txt")], **quiet)
        (PACKAGES / "requirements.txt").write_bytes(locked.content)
        uv, venv = str(PACKAGES / "bin" / "uv"), PACKAGES / "venv"
        environment = os.environ | {"UV_CACHE_DIR": str(PACKAGES / "uv")}
        subprocess.run([uv, "venv", "--quiet", "--clear", str(venv)], env=environment, **quiet)
        install = [uv, "pip", "install", "--quiet", "--python", str(venv / "bin" / "python"), "--require-hashes"]
        subprocess.run([*install, "-r", str(PACKAGES / "requirements.txt")], env=environment, **quiet)
        shutil.rmtree(venv)
        done.touch()


def module_at(name: str, path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
