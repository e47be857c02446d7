"""This machine and forerun's own tables: checks of the installation, chips, slices, prices and error codes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from forerun.doctor.checks import CHECKS
from forerun.doctor.machine import Finding, Machine
from forerun.error_catalog import ErrorEntry, code_of, codes, entry_of
from forerun.errors import UserError, did_you_mean
from forerun.hardware import show
from forerun.hardware.prices import provider_names

TABLES = ("chips", "slices", "prices")


def diagnose() -> list[Finding]:
    """Check this machine: versions, devices, environment variables, disk and memory.

    Returns:
      A finding for each check, with `name`, `status` (ok, warn or FAIL), `found` and `fix`.
    """
    return list(findings())


def findings() -> Iterator[Finding]:
    """Yield the finding of each check as soon as it is known."""
    here = Machine.here()
    for check in CHECKS:
        yield check(here)


def hardware_table(
    table: str,
    *,
    prices: str | os.PathLike[str] | None = None,
    zone: str | None = None,
    provider: str | Sequence[str] = (),
) -> str:
    """Return a table of the hardware that `plan` knows, as text, with the sources of its numbers.

    Args:
      table: chips, slices or prices.
      prices: a file with prices that replace the list prices.
      zone: only the prices of this zone.
      provider: only the prices of this provider or these providers, such as `"lambda"`.

    Raises:
      UserError: There is no such table.
    """
    if table not in TABLES:
        near = did_you_mean(table, TABLES)
        fix = f"did you mean '{near}'?" if near else "see: forerun hardware --help"
        raise UserError("E-COMMAND-013", f"there is no table '{table}'", why=f"tables: {', '.join(TABLES)}", fix=fix)
    if table == "prices":
        return show.prices_table(None if prices is None else os.fspath(prices), zone, provider_names(provider))
    return show.chips_table() if table == "chips" else show.slices_table()


def explain(code: str) -> ErrorEntry:
    """Return what, why and fix of an error code, as forerun's source code raises them.

    Args:
      code: such as `"E-DATA-017"`; `"e-data-17"` is accepted too.

    Returns:
      An entry with `code`, and with `what`, `why` and `fix`, each a tuple of all texts that the error can have. `note`
      is the address of a longer explanation in the docs, or None.

    Raises:
      UserError: There is no such code.
    """
    all_codes, name = codes(), code_of(code)
    if name not in all_codes:
        near = did_you_mean(name, all_codes)
        raise UserError(
            "E-COMMAND-026",
            f"there is no error code '{code}'",
            why=f"forerun has {len(all_codes)} codes, such as {all_codes[0]}",
            fix=f"did you mean {near}?" if near else "forerun explain lists all codes",
        )
    return entry_of(name)
