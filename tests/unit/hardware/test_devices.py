from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest
from error_assertions import raises_error

from forerun.errors import UserError
from forerun.hardware.devices import Absence, CpuWithoutJax, ThisMachine, choose
from forerun.installation import install_command

NOT_HERE = Absence("none is attached to this machine", "run elsewhere")


class Pretended:
    """A machine with so many devices of each platform."""

    def __init__(self, tpu: int = 0, gpu: int = 0, cpu: int = 8, broken: str = "", attached: bool = False) -> None:
        self.counts = {"tpu": tpu, "gpu": gpu, "cpu": cpu}
        self.broken, self.attached = broken, attached
        self.opened: list[str] = []

    def absence(self, platform: str) -> Absence | None:
        return None if self.counts[platform] else Absence(NOT_HERE.why, NOT_HERE.fix, self.attached)

    def devices(self, platform: str) -> tuple[str, ...]:
        self.opened.append(platform)
        if self.broken and platform == "tpu":
            raise RuntimeError(self.broken)
        return tuple(f"{platform}{index}" for index in range(self.counts[platform]))


@pytest.mark.parametrize(
    ("machine", "platform"), [(Pretended(tpu=4, gpu=2), "tpu"), (Pretended(gpu=2), "gpu"), (Pretended(), "cpu")]
)
def test_auto_takes_tpu_then_gpu_then_cpu(machine: Pretended, platform: str) -> None:
    chosen = choose("auto", None, machine)
    assert chosen.platform == platform
    assert len(chosen.devices) == machine.counts[platform]
    assert chosen.warning is None
    assert machine.opened == [platform]


def test_auto_says_why() -> None:
    reason = f"auto: no TPU ({NOT_HERE.why}), no GPU ({NOT_HERE.why}), so cpu with 8 devices"
    assert choose("auto", None, Pretended()).reason == reason
    assert choose("auto", None, Pretended(tpu=1)).reason == "auto: tpu with 1 device"


def test_auto_warns_when_an_attached_tpu_is_not_used() -> None:
    chosen = choose("auto", None, Pretended(tpu=4, broken="The TPU is already in use by process with pid 7"))
    assert chosen.platform == "cpu"
    assert chosen.warning is not None
    assert "with pid 7" in chosen.warning
    assert "forerun doctor" in chosen.warning
    assert choose("auto", None, Pretended(attached=True)).warning is not None


@pytest.mark.parametrize("device", ["tpu", "gpu"])
def test_explicit_device_that_is_absent_is_an_error(device: str) -> None:
    machine = Pretended()
    with pytest.raises(UserError) as error:
        choose(device, None, machine)
    assert device.upper() in error.value.what
    assert "none is attached" in error.value.why
    assert error.value.fix.startswith("run elsewhere\n")
    assert "forerun plan" in error.value.fix
    assert machine.opened == []


def test_explicit_cpu_on_a_tpu_machine() -> None:
    machine = Pretended(tpu=4)
    assert choose("cpu", None, machine).platform == "cpu"
    assert machine.opened == ["cpu"]


def test_list_falls_back_with_one_warning() -> None:
    chosen = choose(("tpu", "cpu"), None, Pretended())
    assert chosen.platform == "cpu"
    assert chosen.warning == "falling back to cpu (TPU: none is attached to this machine)"


def test_list_without_need_to_fall_back() -> None:
    chosen = choose(("tpu", "cpu"), None, Pretended(tpu=4))
    assert (chosen.platform, chosen.warning) == ("tpu", None)


def test_list_keeps_its_order() -> None:
    assert choose(("cpu", "tpu"), None, Pretended(tpu=4)).platform == "cpu"


def test_list_of_which_nothing_is_here() -> None:
    with raises_error("E-HARDWARE-004"):
        choose(("tpu", "gpu"), None, Pretended())


@pytest.mark.parametrize("device", [(), "npu", ("tpu", "auto")])
def test_what_is_not_a_device(device: str | tuple[str, ...]) -> None:
    with raises_error("E-HARDWARE-002"):
        choose(device, None, Pretended())


def test_count_takes_the_first() -> None:
    chosen = choose("tpu", 2, Pretended(tpu=4))
    assert chosen.devices == ("tpu0", "tpu1")
    assert "2 of 4" in chosen.reason


def test_count_beyond_what_is_here() -> None:
    with raises_error("E-HARDWARE-003", "8", "4") as error:
        choose("tpu", 8, Pretended(tpu=4))
    assert error.value.fix == "devices=4, or leave devices out"
    with pytest.raises(UserError) as error:
        choose("cpu", 16, Pretended())
    assert "--xla_force_host_platform_device_count=16" in error.value.fix


def machine(root: Path, *packages: str, **environment: str) -> ThisMachine:
    return ThisMachine(root, environment, lambda name: name in packages)


def touch(root: Path, path: str, text: str = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def why(found: Absence | None) -> str:
    assert found is not None
    return found.why


def test_tpu_ruled_out_cheaply(tmp_path: Path) -> None:
    assert why(machine(tmp_path).absence("tpu")) == "libtpu is not installed"
    assert why(machine(tmp_path, "libtpu").absence("tpu")) == "none is attached to this machine"
    touch(tmp_path, "dev/accel0")
    excluded = machine(tmp_path, "libtpu", JAX_PLATFORMS="cpu").absence("tpu")
    assert why(excluded) == "JAX_PLATFORMS=cpu excludes it"
    assert excluded is not None
    assert (excluded.fix, excluded.attached) == ("unset JAX_PLATFORMS", True)
    assert machine(tmp_path, "libtpu").absence("tpu") is None
    assert machine(tmp_path, "libtpu", JAX_PLATFORMS="tpu,cpu").absence("tpu") is None


def test_attached_tpu_without_libtpu_is_told(tmp_path: Path) -> None:
    touch(tmp_path, "dev/accel0")
    found = machine(tmp_path).absence("tpu")
    assert found == Absence("libtpu is not installed", install_command("tpu"), attached=True)


def test_tpu_known_by_its_pci_card_but_not_googles_network_card(tmp_path: Path) -> None:
    card = "sys/bus/pci/devices/0000:00:04.0"
    touch(tmp_path, f"{card}/vendor", "0x1ae0\n")
    touch(tmp_path, f"{card}/device", "0x0042\n")
    assert machine(tmp_path).attached_tpu() is None
    touch(tmp_path, f"{card}/device", "0x006f\n")
    assert machine(tmp_path).attached_tpu() == "PCI card 0000:00:04.0"


def test_vfio_counts_only_with_a_hint(tmp_path: Path) -> None:
    touch(tmp_path, "dev/vfio/vfio")
    touch(tmp_path, "dev/vfio/0")
    assert machine(tmp_path).attached_tpu() is None
    assert machine(tmp_path, TPU_WORKER_ID="0").attached_tpu() == "/dev/vfio/0 and TPU_WORKER_ID"


def test_gpu_ruled_out_cheaply(tmp_path: Path) -> None:
    assert "plugin is not installed" in why(machine(tmp_path).absence("gpu"))
    assert "none is attached" in why(machine(tmp_path, "jax_cuda13_plugin").absence("gpu"))
    touch(tmp_path, "dev/nvidia0")
    assert machine(tmp_path, "jax_cuda13_plugin").absence("gpu") is None
    assert machine(tmp_path, "jax_cuda13_plugin", JAX_PLATFORMS="cuda").absence("gpu") is None
    assert "excludes it" in why(machine(tmp_path, "jax_cuda13_plugin", JAX_PLATFORMS="cpu").absence("gpu"))


def test_the_real_machine_shows_its_cpus() -> None:
    chosen = choose("cpu", 2)
    assert [device.platform for device in chosen.devices] == ["cpu", "cpu"]


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
