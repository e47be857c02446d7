from __future__ import annotations

import signal
from pathlib import Path

from forerun.supervise.child import oom_kills
from forerun.supervise.leader.leader_view import Member
from forerun.supervise.leader.verdicts import death
from forerun.supervise.protocol.messages import OUT_OF_MEMORY, WorkerExit


def test_the_counter_is_found_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    proc, mounted = tmp_path / "cgroup", tmp_path / "mounted"
    assert oom_kills(proc, mounted) == 0
    proc.write_text("4:memory:/jobs/one\n1:cpu,cpuacct:/\n0::/\n")
    assert oom_kills(proc, mounted) == 0
    old = mounted / "memory" / "jobs" / "one" / "memory.oom_control"
    old.parent.mkdir(parents=True)
    old.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert oom_kills(proc, mounted) == 3
    proc.write_text("0::/jobs/two\n")
    new = mounted / "jobs" / "two" / "memory.events"
    new.parent.mkdir(parents=True)
    new.write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 7\n")
    assert oom_kills(proc, mounted) == 2


def test_a_worker_that_the_kernel_killed_is_told_so() -> None:
    def killed(tail: str) -> Member:
        return Member(0, "a", "vm-0", 100, 0.0, exit=WorkerExit(-signal.SIGKILL, False, tail))

    assert "out of memory; give it more" in death(killed(f"step 7\n{OUT_OF_MEMORY}\n"))
    assert "kill -9, or the kernel" in death(killed("step 7\n"))
