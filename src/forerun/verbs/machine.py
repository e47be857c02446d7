"""This machine and forerun's own tables: checks of the installation, chips, slices, prices and error codes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from forerun.errors import UserError, did_you_mean
from forerun.verbs.option_types import File, Providers, Value, Zone

if TYPE_CHECKING:
    from forerun.doctor.machine import Finding
    from forerun.error_catalog import ErrorEntry

TABLES = ("chips", "slices", "prices")


def diagnose() -> list[Finding]:
    """Check this machine: versions, devices, environment variables, disk and memory.

    Returns:
      A finding for each check, with `name`, `status` (ok, warn or FAIL), `found` and `fix`.
    """
    from forerun.doctor.checks import CHECKS
    from forerun.doctor.machine import Machine

    machine = Machine.here()
    return [check(machine) for check in CHECKS]


def hardware_table(
    table: Annotated[str, Value("TABLE", is_positional=True)] | None = None,
    *,
    prices: File | None = None,
    zone: Zone | None = None,
    provider: Providers = (),
) -> str:
    """Return a table of the hardware that `plan` knows, as text, with the sources of its numbers.

    Args:
      table: chips, slices or prices (default: all)
      prices: use the prices in this file instead of list prices
      zone: only prices of this zone
      provider: only prices of these providers, for example lambda

    Raises:
      UserError: There is no such table.
    """
    from forerun.hardware import show
    from forerun.hardware.prices import provider_names

    if table is None:
        texts = [hardware_table(name, prices=prices, zone=zone, provider=provider) for name in TABLES]
        return "\n\n".join(texts)
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
      code: error code such as E-DATA-017; e-data-17 is accepted too

    Returns:
      An entry with `code`, and with `what`, `why` and `fix`, each a tuple of all texts that the error can have. `note`
      is the address of a longer explanation in the docs, or None.

    Raises:
      UserError: There is no such code.
    """
    from forerun.error_catalog import code_of, codes, entry_of

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
