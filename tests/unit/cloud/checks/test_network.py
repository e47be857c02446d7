"""Firewall rules: which of them lets a connection in."""

from typing import Any

import pytest

from forerun.cloud.cloud_checks import ANYWHERE, TUNNEL_RANGE, allowed_by


def rule(name: str, **values: Any) -> dict[str, Any]:
    tcp = [{"IPProtocol": "tcp", "ports": ["22"]}]
    return {"name": name, "direction": "INGRESS", "priority": 1000, "sourceRanges": [ANYWHERE], "allowed": tcp} | values


def deny(name: str, **values: Any) -> dict[str, Any]:
    found = rule(name, **values)
    del found["allowed"]
    return found | {"denied": [{"IPProtocol": "all"}]}


@pytest.mark.parametrize(
    ("rules", "source", "port", "name"),
    [
        ([], ANYWHERE, 22, None),
        ([rule("ssh")], ANYWHERE, 22, "ssh"),
        ([rule("ssh")], TUNNEL_RANGE, 22, "ssh"),
        ([rule("ssh")], ANYWHERE, 23, None),
        ([rule("iap", sourceRanges=[TUNNEL_RANGE])], ANYWHERE, 22, None),
        ([rule("iap", sourceRanges=[TUNNEL_RANGE])], TUNNEL_RANGE, 22, "iap"),
        ([rule("range", allowed=[{"IPProtocol": "tcp", "ports": ["20-30"]}])], ANYWHERE, 22, "range"),
        ([rule("all", allowed=[{"IPProtocol": "all"}])], ANYWHERE, 8476, "all"),
        ([rule("udp", allowed=[{"IPProtocol": "udp"}])], ANYWHERE, 22, None),
        ([rule("off", disabled=True)], ANYWHERE, 22, None),
        ([rule("out", direction="EGRESS")], ANYWHERE, 22, None),
        ([rule("tagged", targetTags=["web"])], ANYWHERE, 22, None),
        ([rule("v6", sourceRanges=["::/0"])], ANYWHERE, 22, None),
        ([rule("ssh"), deny("no", priority=900)], ANYWHERE, 22, None),
        ([rule("ssh"), deny("no", priority=1000)], ANYWHERE, 22, None),
        ([rule("ssh"), deny("no", priority=2000)], ANYWHERE, 22, "ssh"),
        ([rule("ssh"), deny("no", priority=900, sourceRanges=["10.0.0.0/8"])], TUNNEL_RANGE, 22, "ssh"),
    ],
)
def test_the_first_rule_that_matches_decides(rules: Any, source: str, port: int, name: str | None) -> None:
    assert allowed_by(rules, source, port) == name
