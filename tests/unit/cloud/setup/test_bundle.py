import io
import json
import stat
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.cloud.host.settings import read_settings
from forerun.cloud.record.entries import AttemptEntry, CloudRun, Option
from forerun.cloud.setup import job_files as job_files_module
from forerun.cloud.setup.bundle import Bundle, environment_file, make_bundle
from forerun.cloud.setup.job_files import job_files
from forerun.cloud.setup.startup import unit_words
from forerun.cloud.ssh.keys import identity_of, public_key
from forerun.errors import UserError

JOB = "model: {layers: 1, embed: 16, heads: 1}\ndata: text\nsteps: 1\n"
OPTION = Option("tpu", "v6e-16", "us-east5-b", "spot", 4, 10.0)
RUN = CloudRun("tiny", "gs://bucket/runs/tiny", JOB, (OPTION,), 40.0, 0.0, device="cpu", total_steps=1)
ATTEMPT = AttemptEntry(2, OPTION, "forerun-tiny-2", 0.0, 3600, 0.0)


@pytest.fixture(autouse=True)
def _own_config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job/text").mkdir(parents=True)
    (tmp_path / "job/text/a.txt").write_text("hello\n")
    return tmp_path / "job"


def unpacked(bundle: Bundle, place: Path) -> Path:
    stream = io.BytesIO()
    bundle.write(stream)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as archive:
        archive.extractall(place, filter="data")
    return place


def test_a_bundle_has_all_that_the_hosts_need(folder, tmp_path):
    bundle = make_bundle(RUN, ATTEMPT, folder, {"HF_TOKEN": "hf_x"}, project="p")
    place = unpacked(bundle, tmp_path / "host")
    names = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert names - {name for name in names if name.endswith(".whl")} == {
        "agent.json",
        "environment",
        "job/job.yaml",
        "job/text/a.txt",
        "requirements.lock",
        "secret",
        "units/forerun-agent.service",
        "units/forerun-train.service",
    }
    assert json.loads((place / "agent.json").read_text()) == {
        "folder": "gs://bucket/runs/tiny",
        "attempt": 2,
        "hosts": 4,
        "export": True,
        "run_name": "tiny",
        "provider": "tpu",
        "resource": "forerun-tiny-2",
        "zone": "us-east5-b",
        "project": "p",
        "host": None,
        "limit_seconds": 3600,
        "deadline_at": None,
    }
    assert (place / "environment").read_text() == "HF_TOKEN=hf_x\n"
    assert {stat.S_IMODE((place / name).stat().st_mode) for name in ("secret", "environment")} == {0o600}
    unit = (place / "units/forerun-train.service").read_text()
    assert "data.path=/var/lib/forerun/job/text name=tiny device=cpu checkpoint.folder=gs://bucket/runs" in unit
    assert "--host auto --secret /var/lib/forerun/secret" in unit


def test_the_agent_gets_its_deadline_with_the_job(folder, tmp_path):
    """The agent reads what the controller writes: the limit and the deadline do not come from the bucket."""
    for name, attempt, deadline in (
        ("limited", ATTEMPT, 1_700_003_600.0),
        ("unlimited", replace(ATTEMPT, limit_seconds=None), None),
    ):
        place = unpacked(make_bundle(RUN, attempt, folder, {}, ready_at=1_700_000_000.0), tmp_path / name)
        settings = read_settings(place / "agent.json")
        assert (settings.limit_seconds, settings.deadline_at) == (attempt.limit_seconds, deadline)


def test_the_same_attempt_gives_the_same_bytes_and_another_one_another_secret(folder, tmp_path):
    first, again = (make_bundle(RUN, ATTEMPT, folder, {}) for _ in range(2))
    assert first.sha256 == again.sha256
    other = make_bundle(RUN, replace(ATTEMPT, number=3), folder, {})
    assert len(first.files["secret"]) == 65
    assert first.files["secret"] != other.files["secret"]
    identity = identity_of(RUN.folder)
    assert stat.S_IMODE(identity.stat().st_mode) == 0o600
    assert stat.S_IMODE(identity.parent.stat().st_mode) == 0o700
    shown = subprocess.run(["ssh-keygen", "-y", "-f", str(identity)], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[:2] == public_key(identity).split()
    assert identity_of("gs://bucket/runs/other") != identity


def test_files_that_appear_after_the_question_are_not_sent(folder):
    local = job_files(JOB, folder, (), "/var/lib/forerun/job")
    (folder / "text/new.txt").write_text("new")
    bundle = make_bundle(RUN, ATTEMPT, folder, {}, local=local)
    assert {name for name in bundle.files if name.startswith("job/")} == {"job/job.yaml", "job/text/a.txt"}


def test_one_host_needs_no_secret_on_its_command_line(folder):
    alone = replace(ATTEMPT, option=replace(OPTION, hosts=1))
    unit = make_bundle(RUN, alone, folder, {}).files["units/forerun-train.service"]
    assert isinstance(unit, bytes)
    assert b"--host" not in unit
    assert b"--supervise" in unit


def test_paths_of_other_folders_and_patterns_move_with_the_job(folder, tmp_path, monkeypatch):
    (tmp_path / "far/deep").mkdir(parents=True)
    (tmp_path / "far/deep/b.txt").write_text("b")
    (tmp_path / "far/c.json").write_text("c")
    (folder / "tokenizer.json").write_text("{}")
    text = f"model: x\ndata: {{path: text/*.txt, tokenizer: tokenizer.json}}\nlora: {{start: {tmp_path}/far/deep}}\n"
    found = job_files(text, folder, (), "/host/job")
    assert {one.name: one.source for one in found.files} == {
        "text/a.txt": folder / "text/a.txt",
        "tokenizer.json": folder / "tokenizer.json",
        "files/0/deep/b.txt": tmp_path / "far/deep/b.txt",
    }
    assert set(found.overrides) == {
        'data.path="/host/job/text/*.txt"',
        "data.tokenizer=/host/job/tokenizer.json",
        "lora.start=/host/job/files/0/deep",
    }
    # A path of the command line is relative to the current folder, and wins.
    monkeypatch.chdir(tmp_path)
    moved = job_files(text, folder, ("data.path=far/**/*.txt",), "/host/job")
    assert 'data.path="/host/job/files/0/far/**/*.txt"' in moved.overrides
    assert "files/0/far/deep/b.txt" in {one.name for one in moved.files}


def test_addresses_and_results_do_not_travel(folder, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store/unit").write_text("x")
    text = f"model: qwen3-0.6b\ndata: {{path: gs://bucket/data, store: {tmp_path}/store}}\n"
    assert job_files(text, folder, (), "/host/job") == job_files_module.JobFiles((), ())


def test_own_modules_travel_if_the_job_names_one(folder):
    (folder / "net.py").write_text("class Net: ...")
    (folder / "helper.py").write_text("")
    assert [one.name for one in job_files("model: net:Net\ndata: gs://b/x\n", folder, (), "/j").files] == [
        "helper.py",
        "net.py",
    ]
    assert job_files("model: other:Net\ndata: gs://b/x\n", folder, (), "/j").files == ()


def test_a_stage_may_name_files_of_the_jobs_folder_only(folder, tmp_path):
    text = "model: x\nstages:\n  one: {data: text}\n  two: {data: TWO}\n"
    found = job_files(text.replace("TWO", "text"), folder, (), "/j")
    assert ([one.name for one in found.files], found.overrides) == (["text/a.txt"], ())
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError) as error:
        job_files(text.replace("TWO", str(tmp_path / "other")), folder, (), "/j")
    assert error.value.code == "E-CLOUD-032"


def test_large_files_belong_in_a_bucket(folder, monkeypatch):
    monkeypatch.setattr(job_files_module, "MOST_BYTES", 5)
    with pytest.raises(UserError) as error:
        job_files(JOB, folder, (), "/j")
    assert error.value.code == "E-CLOUD-033"
    assert "text/a.txt" in error.value.why
    assert "gs://" in error.value.fix


@pytest.mark.parametrize("value", ["plain", "", 'a b"c', "d$e`f\\g", "ü # =x'"])
def test_an_environment_file_has_the_same_meaning_in_a_shell(value, tmp_path):
    """systemd documents that quotes and escapes of these files are those of a shell."""
    (tmp_path / "environment").write_text(environment_file({"KEY": value}))
    command = f'. {tmp_path}/environment; printf %s "$KEY"'
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout == value


@pytest.mark.parametrize(("name", "value"), [("A-B", "x"), ("1A", "x"), ("A", "x\ny"), ("A=B", "x")])
def test_what_cannot_be_a_variable_is_refused(name, value):
    with pytest.raises(UserError) as error:
        environment_file({name: value})
    assert error.value.code == "E-CLOUD-034"
    assert "x\ny" not in str(error.value)


def test_systemd_reads_the_same_words(tmp_path):
    words = ["/bin/echo", "a=b c", 'quote"d', "100%", "$HOME", "back\\slash", "", "semi;colon"]
    text = unit_words(words)
    assert text == r'/bin/echo "a=b c" "quote\"d" 100%% "$$HOME" "back\\slash" "" "semi;colon"'
