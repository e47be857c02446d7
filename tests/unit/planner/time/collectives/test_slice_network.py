"""Transfers between slices, against times worked out by hand."""

from __future__ import annotations

import pytest

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.collectives.slice_network import LATENCY_SECONDS, SliceNetwork
from forerun.planner.time.execution import Spent
from forerun.planner.time.simulation import Simulation

MIB = 2**20
MACHINE = ChipModel(
    clock_hz=1e9,
    matmul_flops=1.0,
    matmul_share=1.0,
    hbm_bytes_per_second=MIB,
    link_bytes_per_second=MIB,
    host_bytes_per_second=MIB * 4,
    op_seconds=0.0,
)
PART = "f32[2048,128]{1,0:T(8,128)}"  # one MiB
ATTRIBUTES = (
    'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_host_transfer_rendezvous="all-reduce.{number}_0",_xla_megascale_reduce_operation="SUM",'
    '_xla_megascale_target="{{1,2}}x{{0:7}}",_xla_megascale_transfer_type="{kind}"}}'
)
DONE = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}'


def begin(number: int, kind: str = "ALL_REDUCE") -> str:
    more = ATTRIBUTES.format(number=number, kind=kind)
    return f"""
  %after.{number} = token[] after-all()
  %send.{number} = ({PART}, u32[], token[]) send(%a, %after.{number}), channel_id={number}, {more}
  %recv.{number} = ({PART}, u32[], token[]) recv(%after.{number}), channel_id={number + 10}, {more}
  %send-done.{number} = token[] send-done(%send.{number}), channel_id={number}, {DONE}"""


def end(number: int) -> str:
    return f"\n  %recv-done.{number} = ({PART}, token[]) recv-done(%recv.{number}), channel_id={number + 10}, {DONE}"


def play(entry: str, network: SliceNetwork) -> Spent:
    text = f"HloModule m\n\nENTRY %main (a: {PART}) -> () {{\n  %a = {PART} parameter(0)\n{entry}\n}}\n"
    return Simulation(parse(text), MACHINE, "v5e", network=network).run()


def test_an_all_reduce_of_two_slices_sends_the_data_once() -> None:
    spent = play(begin(1) + end(1), SliceNetwork(2, MIB, 4 * MIB))
    assert spent.seconds == pytest.approx(1.0 + LATENCY_SECONDS)
    assert dict(spent.by_kind) == {"network": pytest.approx(1.0 + LATENCY_SECONDS)}


def test_of_many_slices_twice() -> None:
    spent = play(begin(1) + end(1), SliceNetwork(16, MIB, 4 * MIB))
    assert spent.seconds == pytest.approx(2 * 15 / 16 + LATENCY_SECONDS)


def test_a_slow_bus_between_device_and_host_limits() -> None:
    spent = play(begin(1) + end(1), SliceNetwork(2, 100 * MIB, MIB / 2))
    assert spent.seconds == pytest.approx(2.0 + LATENCY_SECONDS)


@pytest.mark.parametrize(("kind", "share"), [("ALL_GATHER", 3.0), ("REDUCE_SCATTER", 0.75), ("ALL_TO_ALL", 0.75)])
def test_other_collectives(kind: str, share: float) -> None:
    spent = play(begin(1, kind) + end(1), SliceNetwork(4, MIB, 100 * MIB))
    assert spent.seconds == pytest.approx(share + LATENCY_SECONDS)


def test_work_between_send_and_receive_hides_the_transfer() -> None:
    """A negation reads and writes a MiB: two seconds, longer than the transfer."""
    spent = play(begin(1) + f"\n  %n = {PART} negate(%a)" + end(1), SliceNetwork(2, MIB, 4 * MIB))
    assert spent.seconds == pytest.approx(2.0)
    assert spent.busy["dcn"] == pytest.approx(1.0 + LATENCY_SECONDS)
    assert "network" not in {kind for kind, seconds in spent.by_kind.items() if seconds}


def test_two_transfers_share_the_network() -> None:
    spent = play(begin(1) + begin(2) + end(1) + end(2), SliceNetwork(2, MIB, 4 * MIB))
    assert spent.seconds == pytest.approx(2 * (1.0 + LATENCY_SECONDS))


def test_the_chips_of_a_host_share_its_network_card() -> None:
    small, large = SliceNetwork.of(slice_named("2xv5e-8"), 15e9), SliceNetwork.of(slice_named("16xv5e-256"), 15e9)
    assert SliceNetwork.of(slice_named("v5e-256"), 15e9) is None
    assert small == SliceNetwork(2, 25e9 / 8, 15e9)  # eight chips on one host
    assert large == SliceNetwork(16, 25e9 / 4, 15e9)
