"""Addresses are parsed in one module, and no other one looks for protocols."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun.storage.address import Address

SOURCE = Path(__file__).resolve().parents[3] / "src" / "forerun"
# "://" as a text of its own, and comparisons with the start of an address.
PROTOCOL_TEST = re.compile(
    r"""[rf]?["']://["']|\b(?:startswith|removeprefix|partition|split|find|index)\(\(?["'][a-z0-9]*://"""
)


@pytest.mark.parametrize(
    ("text", "protocol", "bucket", "prefix"),
    [
        ("gs://bucket/a/b", "gs", "bucket", "a/b"),
        ("s3://bucket", "s3", "bucket", ""),
        ("https://host/a?b=c", "https", "host", "a?b=c"),
        ("hf://datasets/owner/name", "hf", "datasets", "owner/name"),
        ("simplecache::https://host/a", "simplecache::https", "host", "a"),
        ("://x", "", "x", ""),
    ],
)
def test_address_with_a_protocol(text: str, protocol: str, bucket: str, prefix: str) -> None:
    address = Address.of(text)
    assert (address.protocol, address.bucket, address.prefix) == (protocol, bucket, prefix)
    assert address.is_remote
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "a/b", "/a:/b", "C:/x", "gs:/bucket", "*.jsonl"])
def test_path_of_this_machine(text: str) -> None:
    address = Address.of(text)
    assert (address.protocol, address.is_remote, address.is_bucket, address.is_web) == (None, False, False, False)
    assert str(address) == text
    assert str(Address.of(Path("a/b"))) == "a/b"


def test_kinds_of_protocols() -> None:
    texts = ("gs://b", "s3://b", "gcs://b", "http://h", "https://h", "hf://d", "file:///a")
    assert [text for text in texts if Address.of(text).is_bucket] == ["gs://b", "s3://b"]
    assert [text for text in texts if Address.of(text).is_web] == ["http://h", "https://h"]


def test_no_other_module_looks_for_a_protocol() -> None:
    assert PROTOCOL_TEST.search('if "://" in text:')
    assert PROTOCOL_TEST.search('text.startswith(("http://", "https://"))')
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent != SOURCE / "storage"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PROTOCOL_TEST.search(line)
    ]
    assert found == []
