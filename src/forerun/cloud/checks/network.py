"""Checks of the firewall: ssh from outside or through a tunnel, and traffic between the hosts of a slice."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forerun.cloud.checks.cloud_need import CloudFinding, CloudNeed
from forerun.cloud.google.rest import Rest

ANYWHERE = "0.0.0.0/0"
TUNNEL_RANGE = "35.235.240.0/20"  # the addresses from which Identity-Aware Proxy connects
INTERNAL_RANGE = "10.128.0.0/9"  # of the subnetworks of the default network
SSH_PORT = 22
HOST_PORT = 8476  # one of the ports between hosts; the rule of the default network opens all


def check_network(rest: Rest, need: CloudNeed) -> Iterator[CloudFinding]:
    """Fail if no rule lets ssh in, and warn if hosts of one slice cannot reach each other."""
    pages = rest.pages("compute", f"projects/{rest.project}/global/firewalls")
    rules = [rule for page in pages for rule in page.get("items") or ()]
    own = [rule for rule in rules if str(rule.get("network") or "").split("/")[-1] == need.network]
    outside, tunnel = (allowed_by(own, place, SSH_PORT) for place in (ANYWHERE, TUNNEL_RANGE))
    create = f"gcloud compute firewall-rules create forerun-ssh --project {rest.project} --network {need.network}"
    if outside:
        yield CloudFinding("ssh", "ok", f"the rule {outside} allows port 22 from everywhere")
    elif partly := _some_rule(own, SSH_PORT):
        found = f"the rule {partly} allows port 22 from some addresses only"
        yield CloudFinding("ssh", "warn", found, "check that your address is one of them, or --tunnel-through-iap")
    else:
        fix = f"{create} --allow tcp:22 --source-ranges YOUR-ADDRESS/32"
        yield CloudFinding("ssh", "FAIL", f"no rule of the network {need.network} allows port 22", fix)
    if tunnel:
        yield CloudFinding("IAP", "ok", f"the rule {tunnel} allows --tunnel-through-iap")
    else:
        fix = f"{create.replace('forerun-ssh', 'forerun-iap')} --allow tcp:22 --source-ranges {TUNNEL_RANGE}"
        yield CloudFinding("IAP", "warn", "no rule allows --tunnel-through-iap", fix)
    if need.hosts > 1:
        inside = allowed_by(own, INTERNAL_RANGE, HOST_PORT)
        if inside:
            yield CloudFinding("hosts", "ok", f"the rule {inside} lets hosts of a slice reach each other")
        else:
            fix = f"{create.replace('forerun-ssh', 'forerun-internal')} --allow tcp,udp,icmp --source-ranges RANGE"
            found = f"no rule lets the {need.hosts} hosts reach each other in {INTERNAL_RANGE}"
            yield CloudFinding("hosts", "warn", found, f"{fix}, with the range of the subnetwork")


def allowed_by(rules: Sequence[Mapping[str, Any]], source: str, port: int) -> str | None:
    """Return the rule that allows TCP to `port` from all addresses of `source`, or None.

    Rules with a lower priority number win, and of equal ones those that deny. Rules for certain machines only (tags,
    service accounts) are ignored: rented hosts have no tags.
    """
    wanted = ipaddress.ip_network(source)
    ordered = sorted(rules, key=lambda rule: (int(rule.get("priority") or 1000), "allowed" in rule))
    for rule in ordered:
        if not _is_general(rule):
            continue
        ranges = [ipaddress.ip_network(one, strict=False) for one in rule.get("sourceRanges") or (ANYWHERE,)]
        same = [one for one in ranges if one.version == wanted.version]
        if "denied" in rule:
            if any(one.overlaps(wanted) for one in same) and _has_port(rule["denied"], port):
                return None
        elif any(wanted.subnet_of(one) for one in same) and _has_port(rule.get("allowed") or (), port):  # type: ignore[arg-type]
            return str(rule.get("name"))
    return None


def _some_rule(rules: Sequence[Mapping[str, Any]], port: int) -> str | None:
    for rule in rules:
        if _is_general(rule) and _has_port(rule.get("allowed") or (), port):
            return str(rule.get("name"))
    return None


def _is_general(rule: Mapping[str, Any]) -> bool:
    if rule.get("direction", "INGRESS") != "INGRESS" or rule.get("disabled"):
        return False
    return not (rule.get("targetTags") or rule.get("targetServiceAccounts") or rule.get("sourceTags"))


def _has_port(entries: Sequence[Mapping[str, Any]], port: int) -> bool:
    for entry in entries:
        if str(entry.get("IPProtocol")).lower() not in ("tcp", "all", "6"):
            continue
        ports = entry.get("ports")
        if not ports:
            return True
        for text in ports:
            first, _, last = str(text).partition("-")
            if int(first) <= port <= int(last or first):
                return True
    return False
