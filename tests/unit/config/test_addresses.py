"""Which URLs a job may contain."""

from __future__ import annotations

import pytest

from forerun.config.addresses import check_addresses, check_arguments
from forerun.errors import JobValueError, UserError

SIGNED = [
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=SECRET&X-Amz-Signature=SECRET",  # S3
    "X-Goog-Signature=SECRET",  # Google
    "GoogleAccessId=me&Expires=1&Signature=SECRET",
    "AWSAccessKeyId=SECRET&Expires=1",
    "sv=2024-01-01&sr=b&sig=SECRET",  # Azure
    "Expires=1&Key-Pair-Id=SECRET",  # CloudFront
    "download=true;token=SECRET",
    "api_key=SECRET",
    "a=%20&access_token=SECRET",
    "key=SECRET",
    "PASSWORD=SECRET",
]


@pytest.mark.parametrize("query", SIGNED)
def test_a_signed_url_is_rejected_and_not_shown(query: str) -> None:
    with pytest.raises(JobValueError) as caught:
        check_addresses({"any": [f"https://host/file.jsonl?{query}"]}, "data.path")
    assert caught.value.code == "E-JOB-023"
    assert "SECRET" not in str(caught.value)
    with pytest.raises(UserError):
        check_arguments(["model", f"--data=https://host/file.txt?{query}"])


@pytest.mark.parametrize(
    "text",
    [
        "https://host/file.jsonl?download=true",
        "https://host/file.jsonl?author=me&page=2&keyboard=qwerty&signal=1&design=x",
        "https://host:8443/@scope/file.jsonl",
        "hf://datasets/owner/name@main/train.jsonl",
        "abfs://container@account.dfs.core.windows.net/file.parquet",
        "sftp://me@host/file.txt",
        "gs://bucket/part-?.jsonl",
        "https://example.org is a text to continue",
        "folder/token=1/a?b",
        "see http://user:password@host for an example",
        "owner/name",
    ],
)
def test_other_texts_are_accepted(text: str) -> None:
    check_addresses(text, "data.path")
    check_arguments([text, f"--data={text}"])
