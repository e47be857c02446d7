"""Options of commands about this machine and about forerun itself."""

from __future__ import annotations

import argparse

from forerun.cli.options.values import comma_list, count, port_number


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun watch`."""
    parser.add_argument(
        "location",
        metavar="LOCATION",
        help="folder of a run, such as runs/quickstart, or the address of its checkpoints in a bucket",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--web", action="store_true", help="serve the report of the run on 127.0.0.1 until Ctrl-C")
    parser.add_argument("--port", metavar="N", type=port_number, help="with --web: the port (default: a free one)")


def add_runs_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun runs`."""
    parser.add_argument(
        "location", metavar="LOCATION", nargs="?", default="runs", help="folder of runs, or of checkpoints in a bucket"
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun doctor`."""
    parser.add_argument("--smoke", action="store_true", help="also train for a minute on the devices of this machine")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="with --smoke: set device, devices or mesh, for example device=tpu; with --cloud: a job and its values",
    )
    cloud = parser.add_argument_group("checks of Google Cloud, instead of those of this machine")
    cloud.add_argument("--cloud", action="store_true", help="check what forerun run needs; nothing is rented")
    cloud.add_argument("--on", metavar="SLICE", help="slice to rent, for example v6e-8: also check its quota")
    cloud.add_argument("--spot", action="store_true", help="check the quota for spot capacity")
    cloud.add_argument("--zones", metavar="ZONES", type=comma_list, default=[], help="zones to check")
    cloud.add_argument("--project", metavar="ID", help="Google Cloud project (default: that of your login)")
    cloud.add_argument("--disk-gib", metavar="N", type=count, help="size of the boot disk in GiB")


def add_hardware_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun hardware`."""
    parser.add_argument("table", metavar="TABLE", nargs="?", help="chips, slices or prices (default: all)")
    parser.add_argument("--prices", metavar="FILE", help="use the prices in this file instead of list prices")
    parser.add_argument("--zone", metavar="ZONE", help="only prices of this zone")
    parser.add_argument(
        "--provider", metavar="NAMES", type=comma_list, action="extend", default=[], help="only these providers"
    )


def add_explain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun explain`."""
    parser.add_argument(
        "code", metavar="CODE", nargs="?", help="error code such as E-DATA-017 (default: list all codes)"
    )


def add_schema_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun schema`."""
    parser.add_argument("--output", metavar="FILE", help="write to this file instead of the terminal")
