"""Options of commands about this machine and about forerun itself."""

from __future__ import annotations

import argparse


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun doctor`."""
    parser.add_argument("--smoke", action="store_true", help="also train for a minute on the devices of this machine")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="with --smoke: set device, devices or mesh, for example device=tpu",
    )


def add_hardware_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun hardware`."""
    parser.add_argument("table", metavar="TABLE", nargs="?", help="chips, slices or prices (default: all)")
    parser.add_argument("--prices", metavar="FILE", help="use the prices in this file instead of list prices")
    parser.add_argument("--zone", metavar="ZONE", help="only prices of this zone")


def add_explain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun explain`."""
    parser.add_argument(
        "code", metavar="CODE", nargs="?", help="error code such as E-DATA-017 (default: list all codes)"
    )


def add_schema_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun schema`."""
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of the terminal")
