"""A service manager for hosts without systemd: the commands of `systemctl` that a host of a run needs.

It reads unit files from /etc/systemd/system. Each unit that is started has a process of its own (`--watch UNIT`) that
starts its command, restarts it as the unit asks, and stops it. It keeps the unit's state in /run/units/UNIT.json.
`/usr/bin/systemctl` of a host calls this file. It needs only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

UNITS, STATES = Path("/etc/systemd/system"), Path("/run/units")
ENABLED = UNITS / "multi-user.target.wants"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def read_unit(name: str) -> dict[str, list[str]]:
    """Return the settings of a unit file. An empty value removes the values before it."""
    settings: dict[str, list[str]] = {}
    text = (UNITS / name).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        found = re.fullmatch(r"\s*([A-Za-z]+)\s*=\s*(.*?)\s*", line)
        if found is None:
            continue
        key, value = found.groups()
        settings.setdefault(key, [])
        settings[key] = [*settings[key], value] if value else []
    return settings


def last(settings: dict[str, list[str]], key: str, default: str) -> str:
    return (settings.get(key) or [default])[-1]


def seconds(text: str) -> float:
    """Return a time span of a unit file, such as `90`, `2min 30s` or `infinity`."""
    if text == "infinity":
        return float("inf")
    units = {"ms": 0.001, "s": 1, "sec": 1, "": 1, "min": 60, "m": 60, "h": 3600}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)\s*([a-z]*)", text))


def environment_of(settings: dict[str, list[str]]) -> dict[str, str]:
    values = {"PATH": PATH, "LANG": "C.UTF-8"}
    if user := last(settings, "User", ""):
        entry = pwd.getpwnam(user)
        values |= {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user, "SHELL": entry.pw_shell}
    for line in settings.get("Environment", []):
        values |= dict(part.split("=", 1) for part in shlex.split(line))
    for name in settings.get("EnvironmentFile", []):
        path = Path(name.removeprefix("-"))
        if not path.exists() and name.startswith("-"):
            continue
        for line in path.read_text().splitlines():
            if "=" in line and not line.lstrip().startswith(("#", ";")):
                key, value = line.split("=", 1)
                values[key.strip()] = "".join(shlex.split(value)) if value[:1] in "\"'" else value.strip()
    return values


def command_of(line: str, environment: dict[str, str]) -> tuple[list[str], bool]:
    """Return the command of an Exec line, and whether its failure is ignored."""
    prefix = re.match(r"[-@+!:|]*", line).group()  # type: ignore[union-attr]
    parts = []
    for part in shlex.split(line[len(prefix) :]):
        whole = re.fullmatch(r"\$(\w+)", part)
        if whole:  # a variable without braces becomes several arguments
            parts += environment.get(whole.group(1), "").split()
            continue
        part = re.sub(r"(?<!\$)\$\{(\w+)\}", lambda found: environment.get(found.group(1), ""), part)
        parts.append(part.replace("$$", "$").replace("%%", "%"))
    return parts, "-" in prefix


class Unit:
    """Runs one unit until it ends for good."""

    def __init__(self, name: str) -> None:
        self.name, self.settings = name, read_unit(name)
        self.state: dict[str, Any] = {"ActiveState": "activating", "SubState": "start", "Result": "success"}
        self.state |= {"MainPID": 0, "ExecMainStatus": 0, "ExecMainCode": 0, "NRestarts": 0, "Watcher": os.getpid()}
        self.stopping = False

    def save(self, **changes: Any) -> None:
        self.state |= changes
        new = STATES / f".{self.name}.{os.getpid()}"
        new.write_text(json.dumps(self.state))
        new.replace(STATES / f"{self.name}.json")
        new.write_text("".join(f"{key}={value}\n" for key, value in self.state.items()))
        new.replace(STATES / f"{self.name}.show")

    def run(self) -> None:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # whatever the unit starts remains below this process
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        self.save()
        while True:
            status = self.once()
            restart = last(self.settings, "Restart", "no")
            succeeded = status in {0, *self.statuses("SuccessExitStatus")}
            wanted = restart == "always" or (restart == "on-failure" and not succeeded)
            wanted |= restart in ("on-abnormal", "on-abort") and status < 0 and not succeeded
            wanted &= restart != "no" and status not in self.statuses("RestartPreventExitStatus")
            if self.stopping or not wanted:
                break
            self.save(ActiveState="activating", SubState="auto-restart", MainPID=0)
            self.wait(seconds(last(self.settings, "RestartSec", "100ms")))
            if self.stopping:
                break
            self.save(NRestarts=self.state["NRestarts"] + 1)
        failed = not succeeded and not (self.stopping and status < 0)
        self.save(
            ActiveState="failed" if failed else "inactive",
            SubState="failed" if failed else "dead",
            Result=("signal" if status < 0 else "exit-code") if failed else "success",
            MainPID=0,
            Watcher=0,
        )

    def statuses(self, key: str) -> set[int]:
        names = {one.name: -one.value for one in signal.Signals}
        return {names[word] if word in names else int(word) for word in last(self.settings, key, "").split()}

    def once(self) -> int:
        """Run the commands of the unit once. Return the exit code, or minus the number of the signal."""
        environment = environment_of(self.settings)
        status = 0
        for key in ("ExecStartPre", "ExecStart"):
            for line in self.settings.get(key, []):
                command, ignored = command_of(line, environment)
                status = self.watch(command, environment, main=key == "ExecStart")
                status = 0 if ignored else status
                if status:
                    break
            if status or self.stopping:
                break
        for line in self.settings.get("ExecStopPost", []):
            self.watch(command_of(line, environment)[0], environment, main=False)
        return status

    def watch(self, command: list[str], environment: dict[str, str], *, main: bool) -> int:
        outputs = [self.output("StandardOutput"), self.output("StandardError")]
        user = last(self.settings, "User", "root")
        with outputs[0], outputs[1]:
            try:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=outputs[0],
                    stderr=outputs[1],
                    cwd=last(self.settings, "WorkingDirectory", "/").removeprefix("-"),
                    start_new_session=True,
                    umask=int(last(self.settings, "UMask", "0022"), 8),
                    **({} if user == "root" else {"user": user, "group": pwd.getpwnam(user).pw_gid}),
                )
            except OSError as error:
                outputs[1].write(f"{self.name}: {error}\n".encode())
                return 203  # EXIT_EXEC of systemd
        if main:
            self.save(ActiveState="active", SubState="running", MainPID=process.pid)
        signalled = False
        while process.poll() is None:
            if self.stopping and not signalled:
                signalled = True
                self.save(ActiveState="deactivating", SubState="stop-sigterm")
                self.signal_all(process.pid)
                limit = time.monotonic() + seconds(last(self.settings, "TimeoutStopSec", "90"))
            if signalled and time.monotonic() > limit:
                self.kill_rest()
            time.sleep(0.02)
            self.reap(process.pid)
        self.kill_rest()  # what the command left running, as systemd does
        code = process.returncode
        if main:
            self.save(ExecMainStatus=abs(code), ExecMainCode=2 if code < 0 else 1, MainPID=0)
        return code

    def signal_all(self, main: int) -> None:
        number = signal.Signals[last(self.settings, "KillSignal", "SIGTERM")]
        everyone = last(self.settings, "KillMode", "control-group") == "control-group"
        for pid in descendants(os.getpid()) if everyone else [main]:
            send(pid, number)

    def kill_rest(self) -> None:
        if last(self.settings, "KillMode", "control-group") != "process":
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGKILL)

    def reap(self, main: int) -> None:
        """Collect processes that were left by their parent, but not the main one: subprocess waits for that."""
        for pid in children(os.getpid()):
            if pid != main:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def wait(self, duration: float) -> None:
        end = time.monotonic() + duration
        while time.monotonic() < end and not self.stopping:
            time.sleep(0.02)

    def output(self, key: str) -> Any:
        value = last(self.settings, key, "inherit" if key == "StandardError" else "journal")
        if value == "inherit" and key == "StandardError":
            return self.output("StandardOutput")
        if value.startswith(("append:", "file:")):
            return open(value.split(":", 1)[1], "ab")
        return open(STATES / f"{self.name}.log", "ab")


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = re.search(r"^PPid:\s*(\d+)", process.read_text(), re.MULTILINE)
        except OSError:
            continue
        if parent and int(parent.group(1)) == pid:
            found += [int(process.parent.name), *descendants(int(process.parent.name))]
    return found


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def state_of(name: str) -> dict[str, Any]:
    loaded = "loaded" if (UNITS / name).exists() else "not-found"
    empty = {"ActiveState": "inactive", "SubState": "dead", "Result": "success", "MainPID": 0, "ExecMainStatus": 0}
    try:
        state = json.loads((STATES / f"{name}.json").read_text())
    except FileNotFoundError:
        state = {**empty, "ExecMainCode": 0, "NRestarts": 0, "Watcher": 0}
    enabled = "enabled" if (ENABLED / name).exists() else "disabled"
    return {"Id": name, "LoadState": loaded, "UnitFileState": enabled} | state


def start(name: str) -> int:
    if not (UNITS / name).exists():
        print(f"Failed to start {name}: Unit {name} not found.", file=sys.stderr)
        return 5
    if state_of(name)["ActiveState"] in ("active", "activating"):
        return 0
    STATES.mkdir(exist_ok=True)
    (STATES / f"{name}.json").unlink(missing_ok=True)
    (STATES / f"{name}.show").unlink(missing_ok=True)
    with (STATES / f"{name}.watch.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, "--watch", name],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd="/",
        )
    while state_of(name)["ActiveState"] == "inactive" and not (STATES / f"{name}.json").exists():
        time.sleep(0.02)
    return 0


def stop(name: str, *, wait: bool) -> int:
    watcher = state_of(name)["Watcher"]
    if watcher:
        send(watcher, signal.SIGTERM)
    while wait and state_of(name)["Watcher"]:
        time.sleep(0.02)
    return 0


def main(arguments: list[str]) -> int:
    options = [one for one in arguments if one.startswith("-")]
    words, properties = [], []
    rest = iter(arguments)
    for one in rest:
        if one in ("-p", "--property"):
            properties += next(rest).split(",")
        elif one.startswith(("--property=", "-p")) and one != "--plain":
            properties += one.removeprefix("--property=").removeprefix("-p").split(",")
        elif one in ("-s", "--signal"):
            options.append(f"--signal={next(rest)}")
        elif not one.startswith("-"):
            words.append(one)
    if options[:1] == ["--watch"]:
        Unit(words[0]).run()
        return 0
    if not words:
        return 0
    verb, *names = words
    names = [name if "." in name else f"{name}.service" for name in names]
    wait = "--no-block" not in options
    code = 0
    for name in names:
        if verb in ("enable", "disable"):
            ENABLED.mkdir(exist_ok=True)
            (ENABLED / name).unlink(missing_ok=True)
            if verb == "enable":
                (ENABLED / name).symlink_to(UNITS / name)
            if "--now" in options:
                code = max(code, start(name) if verb == "enable" else stop(name, wait=wait))
        elif verb == "start":
            code = max(code, start(name))
        elif verb == "stop":
            code = max(code, stop(name, wait=wait))
        elif verb in ("restart", "try-restart"):
            stop(name, wait=True)
            code = max(code, start(name))
        elif verb == "is-active":
            active = state_of(name)["ActiveState"]
            print(active) if "--quiet" not in options and "-q" not in options else None
            code = code if active == "active" else 3
        elif verb == "is-enabled":
            print(state_of(name)["UnitFileState"])
            code = code if state_of(name)["UnitFileState"] == "enabled" else 1
        elif verb == "is-failed":
            print(state_of(name)["ActiveState"])
            code = 0 if state_of(name)["ActiveState"] == "failed" else 1
        elif verb in ("show", "status"):
            state = state_of(name)
            for key in properties or [key for key in state if key != "Watcher"]:
                print(state.get(key, "") if "--value" in options else f"{key}={state.get(key, '')}")
        elif verb == "kill":
            number = next((one.split("=")[1] for one in options if one.startswith("--signal=")), "SIGTERM")
            number = number if number.startswith("SIG") else f"SIG{number}"
            if pid := state_of(name)["MainPID"]:
                send(pid, signal.Signals[number])
        elif verb == "reset-failed":
            if state_of(name)["ActiveState"] == "failed":
                (STATES / f"{name}.json").unlink(missing_ok=True)
        else:
            print(f"Unknown command verb {verb}.", file=sys.stderr)
            return 1
    if not names and verb not in ("daemon-reload", "daemon-reexec", "reset-failed", "is-system-running"):
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
