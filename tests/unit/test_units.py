"""Numbers have as many digits as their accuracy supports."""

from __future__ import annotations

import pytest

from forerun.units import GIB, MIB, TIB, Bytes, Usd, digits


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (20.69 * MIB, "20.7 MiB"),
        (182.55 * MIB, "183 MiB"),
        (1023.7 * MIB, "1,024 MiB"),
        (15.75 * GIB, "15.75 GiB"),  # HBM: a job may lack 0.05 of it
        (103.38 * GIB, "103 GiB"),
        (28689.20 * GIB, "28.0 TiB"),
        (-4.25 * GIB, "-4.25 GiB"),
        (5000 * TIB, "4.88 PiB"),
    ],
)
def test_bytes(size: float, text: str) -> None:
    assert str(Bytes(int(size))) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "$0.00"),
        (0.001, "<$0.01"),
        (0.274, "$0.27"),
        (0.997, "$1.0"),
        (9.934, "$9.9"),
        (27.31, "$27"),
        (99.7, "$100"),
        (285.12, "$285"),
        (436.9, "$437"),
        (1234.56, "$1,230"),
        (99_949, "$99,900"),
        (99_951, "$100k"),
        (1_234_567, "$1.23M"),
    ],
)
def test_dollars(amount: float, text: str) -> None:
    assert str(Usd(amount)) == text


def test_digits_never_have_an_exponent() -> None:
    for power in range(-6, 16):
        for count in (2, 3):
            text = digits(9.996 * 10.0**power, count)
            assert "e" not in text
            assert float(text.replace(",", "")) == pytest.approx(9.996 * 10.0**power, rel=0.05)
