"""The begin of a run and its resumption: what is kept, what is replaced, and which names are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_cloud import START, SimulatedCloud, SimulatedProvider, cloud_run, option

from forerun.cloud.control.begin import begin_run, usd_so_far, with_cap
from forerun.cloud.control.ledger import RunLedger
from forerun.cloud.provider import SliceRequest
from forerun.cloud.record.entries import AttemptEntry, EndEntry, ReadyEntry, StopEntry
from forerun.errors import UserError

RUN = cloud_run(option())


def test_the_same_command_resumes_a_stopped_run() -> None:
    cloud = SimulatedCloud({})
    files, providers = cloud.files(), {"tpu": SimulatedProvider(cloud)}
    begun = begin_run(files, RUN, providers, START)
    assert files.run() == begun == replace(RUN, created_at=START)
    files.request_stop(StopEntry(START, "user"))
    again = begin_run(files, replace(RUN, max_usd=60.0), providers, START + 100)
    assert files.stop() is None
    assert (again.max_usd, again.created_at) == (60.0, START)
    assert files.run() == again
    kept = begin_run(files, replace(RUN, max_usd=99.0), providers, START + 200, max_usd_given=False)
    assert kept.max_usd == 60.0


@pytest.mark.parametrize("other", [replace(RUN, job="steps: 7\n"), replace(RUN, arguments=("seed=2",))])
def test_another_job_of_the_same_name_is_refused(other: object) -> None:
    cloud = SimulatedCloud({})
    files, providers = cloud.files(), {"tpu": SimulatedProvider(cloud)}
    begun = begin_run(files, RUN, providers, START)
    with pytest.raises(UserError) as raised:
        begin_run(files, other, providers, START)  # type: ignore[arg-type]
    assert raised.value.code == "E-CLOUD-061"
    assert files.run() == begun


def test_a_run_of_the_same_name_in_another_bucket_is_refused() -> None:
    cloud = SimulatedCloud({})
    provider = SimulatedProvider(cloud)
    labels = {"forerun-run": "sim", "forerun-attempt": "1", "forerun-role": "slice"}
    metadata = {"forerun-folder": "gs://other/sim"}
    provider.create(SliceRequest("forerun-sim-1", "v6e-8", "zone-a", "spot", labels, metadata, "id"))
    with pytest.raises(UserError) as raised:
        begin_run(cloud.files(), RUN, {"tpu": provider}, START)
    assert raised.value.code == "E-CLOUD-062"
    assert cloud.files().run() is None


def test_the_cost_of_an_earlier_keeper_is_kept() -> None:
    cloud = SimulatedCloud({})
    files, providers = cloud.files(), {"tpu": SimulatedProvider(cloud)}
    kept = replace(RUN, keeper=True, keeper_usd_per_hour=0.36)
    begin_run(files, kept, providers, START)
    files.create_attempt(AttemptEntry(1, option(), "forerun-sim-1", START, None, 0.0))
    files.create_end(1, EndEntry(START + 10000, "stopped", 1.0))
    again = begin_run(files, kept, providers, START + 1e6)
    assert again.keeper_spent_usd == pytest.approx(1.0)
    assert again.keeper_at == START + 1e6


def test_a_resumed_run_keeps_the_cap_that_its_question_names() -> None:
    cloud = SimulatedCloud({})
    files, providers, ledger = cloud.files(), {"tpu": SimulatedProvider(cloud)}, RunLedger()
    planned = replace(RUN, max_usd=20.0)
    assert with_cap(files, planned, ledger, max_usd_given=False).max_usd == 20.0
    begin_run(files, replace(RUN, max_usd=500.0), providers, START)
    asked = with_cap(files, planned, ledger, max_usd_given=False)
    assert asked.max_usd == 500.0
    assert begin_run(files, asked, providers, START).max_usd == 500.0
    lower = with_cap(files, planned, ledger, max_usd_given=True)
    assert lower.max_usd == 20.0
    assert begin_run(files, lower, providers, START).max_usd == 20.0


@pytest.mark.parametrize("content", [b"garbage", b'{"max_usd": NaN}', b"null"])
def test_a_damaged_cap_needs_the_cap_of_the_user(content: bytes) -> None:
    cloud = SimulatedCloud({})
    files, providers = cloud.files(), {"tpu": SimulatedProvider(cloud)}
    cloud.contents["cloud/run.json"] = content
    with pytest.raises(UserError) as raised:
        with_cap(files, RUN, RunLedger(), max_usd_given=False)
    assert raised.value.code == "E-CLOUD-095"
    asked = with_cap(files, RUN, RunLedger(), max_usd_given=True)
    assert begin_run(files, asked, providers, START).max_usd == RUN.max_usd
    assert files.run() == replace(RUN, created_at=START)


def test_a_record_without_a_cap_is_no_run_without_a_limit() -> None:
    cloud = SimulatedCloud({})
    cloud.files().create_run(replace(RUN, max_usd=None))
    with pytest.raises(UserError) as raised:
        with_cap(cloud.files(), RUN, RunLedger(), max_usd_given=False)
    assert raised.value.code == "E-CLOUD-095"


def test_a_forged_cap_does_not_replace_the_one_that_this_machine_agreed_to() -> None:
    cloud = SimulatedCloud({})
    files, providers, ledger = cloud.files(), {"tpu": SimulatedProvider(cloud)}, RunLedger()
    begin_run(files, replace(RUN, max_usd=30.0), providers, START, ledger=ledger)
    for content in (replace(RUN, max_usd=1e6), replace(RUN, max_usd=30.0)):
        files.replace_run(content)
        assert with_cap(files, RUN, ledger, max_usd_given=False).max_usd == 30.0
    cloud.contents["cloud/run.json"] = b"garbage"
    assert with_cap(files, RUN, ledger, max_usd_given=False).max_usd == 30.0


def test_what_is_spent_is_known_before_the_question() -> None:
    cloud = SimulatedCloud({})
    files, providers, ledger = cloud.files(), {"tpu": SimulatedProvider(cloud)}, RunLedger()
    assert usd_so_far(files, RUN, ledger, providers, START) == 0.0
    files.create_run(RUN)
    for number in (1, 2):
        files.create_attempt(AttemptEntry(number, option(), f"forerun-sim-{number}", START, 3600, 0.0))
        files.create_ready(number, ReadyEntry(START))
    files.create_end(1, EndEntry(START + 720, "preempted", 2.0))
    assert usd_so_far(files, RUN, ledger, providers, START + 1080) == pytest.approx(2.0 + 3.0)
    assert ledger.attempts == {}
