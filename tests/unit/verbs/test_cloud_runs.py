"""Cloud runs from Python: the list and the results are those of the command line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from error_assertions import assert_error
from recorded_cloud import ListedProvider, act, started

import forerun as fr
from forerun.cli.main import main
from forerun.cloud import providers
from forerun.cloud.provider import CloudUnavailable
from forerun.cloud.record.entries import FinishEntry


def test_the_list_and_the_results_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    cloud, controller = started(tmp_path / "quick")
    act(cloud, controller, 60)
    provider = ListedProvider(cloud)
    monkeypatch.setattr(providers, "all_providers", lambda project: [provider])
    assert main(["ps", "--json"]) == 0
    assert [asdict(row) for row in fr.cloud_resources()] == json.loads(capsys.readouterr().out)["resources"]
    with pytest.raises(fr.UserError) as caught:
        fr.fetch_run("quick")
    assert_error(caught.value, "E-CLOUD-078")
    digest = hashlib.sha256(b"{}").hexdigest()
    cloud.files().run_folder.create("cloud/run/summary.json", b"{}")
    cloud.files().create_finished(FinishEntry(cloud.now, 1, {"cloud/run/summary.json": (2, digest)}))
    assert fr.fetch_run("quick") == Path("runs/quick")
    assert fr.fetch_run(str(cloud.folder), tmp_path / "there") == tmp_path / "there"
    assert (tmp_path / "there" / "summary.json").read_bytes() == b"{}"

    def unavailable() -> None:
        raise CloudUnavailable("503")

    monkeypatch.setattr(provider, "list", unavailable)
    with pytest.raises(fr.UserError) as caught:
        fr.cloud_resources()
    assert_error(caught.value, "E-CLOUD-067", why="503")
