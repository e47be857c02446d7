"""Control characters in all texts that reach a unit, a script or a command line."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.main import main
from forerun.cloud.manifests import Launch, launch_folder
from forerun.cloud.one_line import require_one_line
from forerun.cloud.provider import HostAddress
from forerun.cloud.record.entries import CloudRun, Option
from forerun.cloud.setup.job_files import job_files
from forerun.cloud.setup.startup import startup_script, unit_files, unit_words
from forerun.cloud.ssh.connection import HostAccess, IapTunnel, ssh_command
from forerun.errors import UserError

CONTROLS = ["\r", "\n", "\x0b", "\x0c", "\x1b", "\x00", "\x7f", "\x85", "\u2028", "\u2029", "\t", "\ud800"]
OPTION = Option("tpu", "v6e-8", "us-east5-b", "spot", 1, 10.0)
JOB = "model: {layers: 1, embed: 16, heads: 1}\ndata: gs://b/x\nsteps: 1\n"
RUN = CloudRun("tiny", "gs://bucket/runs/tiny", JOB, (OPTION,), 40.0, 0.0, device="cpu", total_steps=1)


def refused(call: Any, *values: Any) -> bool:
    with pytest.raises(UserError) as error:
        call(*values)
    return error.value.code == "E-CLOUD-110"


@pytest.mark.parametrize("control", CONTROLS)
def test_every_writer_rejects_every_control_character(control: str, tmp_path: Path) -> None:
    text = f"a{control}ExecStartPre=/bin/touch x"
    assert refused(require_one_line, {"name": [text]})
    assert refused(unit_words, ["/bin/echo", text])
    for run in (
        replace(RUN, arguments=(f"seed={text}",)),
        replace(RUN, name=text),
        replace(RUN, folder=f"gs://{text}/x"),
    ):
        assert refused(unit_files, run, 1)
    assert refused(startup_script, replace(RUN, name=text), OPTION)
    assert refused(startup_script, RUN, OPTION, [text])
    host = HostAddress(0, "203.0.113.7", "10.0.0.2", instance="host")
    for access in (
        HostAccess(replace(host, address=text), (), None),
        HostAccess(host, (), None, user=text),
        HostAccess(replace(host, instance=text), (), None),
        HostAccess(host, (), None, tunnel=IapTunnel(text, "zone")),
        HostAccess(host, (), None, tunnel=IapTunnel("project", text)),
    ):
        assert refused(ssh_command, access, tmp_path, "true")
    launch = Launch("tiny", JOB, "gpu", None, 1, 8)
    assert refused(launch_folder, replace(launch, queue=text), "slurm", tmp_path, tmp_path)
    assert refused(launch_folder, launch, "slurm", tmp_path / text, tmp_path)
    assert refused(launch_folder, launch, "slurm", tmp_path, tmp_path / text)
    assert refused(launch_folder, replace(launch, image=text), "gke", tmp_path, tmp_path)


@pytest.mark.parametrize("control", ["\r", "\n", "\x1b"])
def test_an_override_is_rejected_before_anything_else(
    control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(job_files, JOB, tmp_path, (f"seed=3{control}x",), "/j")
    (tmp_path / "job.yaml").write_text(JOB)
    job = str(tmp_path / "job.yaml")
    bucket = ["--bucket", "gs://bucket/runs"]
    for words in (
        ["run", job, f"name=a{control}b", "--on", "v5e-8", *bucket],
        ["run", job, "--on", "v5e-8", *bucket, "--network", f"a{control}b"],
        ["run", job, "--on", "v5e-8", *bucket, "--zones", f"a{control}b"],
        ["manifest", job, f"seed=3{control}", "--on", "v5e-8", "--for", "slurm"],
        ["manifest", job, "--on", "v5e-8", "--for", "slurm", "--queue", f"a{control}b"],
    ):
        assert main(words) == 2
        assert "E-CLOUD-110" in capsys.readouterr().err


def test_ordinary_texts_are_accepted() -> None:
    require_one_line({"a": "ü é 中 = ; $ % \" ' \\ `", "b": ["x y"], "c": None, "d": 3, "e": ("z",)})


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_reads_one_command_from_a_unit(tmp_path: Path) -> None:
    words = ["/bin/echo", "x;y", ";", "$(id)", "`id`", "%n", "\\", '"', "é", "a ExecStartPre=/bin/touch x"]
    (tmp_path / "one.service").write_text(f"[Service]\nType=oneshot\nExecStart={unit_words(words)}\n")
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "one.service")]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert "one.service" not in shown.stderr, shown.stderr
    assert len(shlex.split(unit_words(words))) == len(words)
