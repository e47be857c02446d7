from __future__ import annotations

import sys

import jax
import pytest

from forerun.hardware.cpu_devices import CpuWithoutJax
from forerun.hardware.devices import ThisMachine, choose


def test_it_names_what_jax_names(monkeypatch: pytest.MonkeyPatch) -> None:
    known = jax.devices("cpu")[0].device_kind
    monkeypatch.delitem(sys.modules, "jax")
    machine = CpuWithoutJax(environment={})
    assert [one.device_kind for one in machine.devices("cpu")] == [known]
    assert choose("cpu", None, machine).reason == "cpu with 1 device, as the job says"


@pytest.mark.parametrize("setting", ["JAX_NUM_CPU_DEVICES", "XLA_FLAGS"])
def test_settings_ask_jax(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setattr(ThisMachine, "devices", lambda self, platform: (platform,) * 4)
    assert len(CpuWithoutJax(environment={setting: "4"}).devices("cpu")) == 4
    assert len(CpuWithoutJax(environment={}).devices("gpu")) == 4
