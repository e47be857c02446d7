"""Options of commands that run jobs in a cloud."""

from __future__ import annotations

import argparse

from forerun.cli.options.job_options import add_job_arguments
from forerun.cli.options.values import comma_list, count, dollars, hours


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun run`."""
    add_job_arguments(parser)
    parser.add_argument(
        "--on",
        metavar="SLICE",
        help="slice to rent, such as v6e-8, a GPU machine type, or ssh:machines.yaml (default: the plan's best)",
    )
    parser.add_argument(
        "--or",
        dest="alternatives",
        metavar="SLICES",
        type=comma_list,
        default=[],
        help="other slices to try without capacity, for example v5e-16",
    )
    parser.add_argument(
        "--goal",
        choices=("cheapest", "fastest", "balanced"),
        default="balanced",
        help="without --on: what the plan optimises for (default: balanced)",
    )
    capacity = parser.add_mutually_exclusive_group()
    capacity.add_argument("--spot", action="store_true", help="rent spot capacity, which the cloud may take back")
    capacity.add_argument("--flex-start", action="store_true", help="wait in the queue for flex-start capacity")
    capacity.add_argument("--reservation", metavar="NAME", help="use this reservation of the project")
    parser.add_argument(
        "--max-usd", metavar="USD", type=dollars, help="stop with a checkpoint before the run costs more than this"
    )
    parser.add_argument(
        "--zones",
        metavar="ZONES",
        type=comma_list,
        default=[],
        help="zones to try, in order (default: the 4 cheapest)",
    )
    add_project_options(parser)
    parser.add_argument(
        "--bucket",
        metavar="ADDRESS",
        help="bucket folder for checkpoints and results, such as gs://my-bucket/runs (default: checkpoint.folder)",
    )
    parser.add_argument(
        "--keeper", action="store_true", help="run the controller on a small VM, so that this machine may be off"
    )
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="end when the hosts train; without --keeper, nothing replaces a preempted slice then",
    )
    parser.add_argument(
        "--wait-seconds",
        metavar="N",
        type=count,
        help="wait this long for capacity in a zone (default: 600 with alternatives, else without a limit)",
    )
    parser.add_argument("--prices", metavar="FILE", help="CSV file of prices that replace the table's")
    parser.add_argument(
        "--usd-per-hour",
        metavar="USD",
        type=dollars,
        help="price of the slice, if the table has none",
    )
    parser.add_argument(
        "--provider",
        choices=("tpu", "compute"),
        help="Cloud TPU API or Compute Engine (default: tpu if possible)",
    )
    parser.add_argument("--disk-gib", metavar="N", type=count, help="size of the boot disk in GiB")
    parser.add_argument("--image", metavar="NAME", help="runtime version or image of the hosts")
    parser.add_argument("--network", metavar="NAME", help="network of the hosts (default: default)")
    parser.add_argument("--subnetwork", metavar="NAME", help="subnetwork of the hosts")
    parser.add_argument("--service-account", metavar="EMAIL", help="service account of the hosts")
    parser.add_argument(
        "--internal-ips",
        action="store_true",
        help="rent hosts without external addresses",
    )
    parser.add_argument("--tunnel-through-iap", action="store_true", help="reach hosts through Identity-Aware Proxy")
    parser.add_argument("--no-export", action="store_true", help="do not export the model at the end")
    parser.add_argument("--yes", action="store_true", help="do not ask before renting")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and every request, and send nothing")
    parser.add_argument("--list-files", action="store_true", help="print the files that are sent to the hosts, and end")
    parser.add_argument("--print-startup", action="store_true", help="print the startup script of the hosts, and end")


def add_manifest_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun manifest`."""
    add_job_arguments(parser)
    parser.add_argument("--on", metavar="SLICE", help="slice to run on, for example v6e-256")
    parser.add_argument(
        "--for",
        dest="scheduler",
        choices=("gke", "skypilot", "slurm"),
        required=True,
        help="gke: a JobSet for Kubernetes; skypilot: a task; slurm: a batch script",
    )
    parser.add_argument("--to", metavar="FOLDER", help="folder to write (default: NAME-SCHEDULER)")
    parser.add_argument("--spot", action="store_true", help="gke, skypilot: use machines that may be preempted")
    parser.add_argument("--queue", metavar="NAME", help="gke: the local queue of Kueue; slurm: the partition")
    parser.add_argument("--image", metavar="IMAGE", help="gke: name of the container image with forerun")
    parser.add_argument("--nodes", metavar="N", type=count, help="slurm, without --on: number of nodes")
    parser.add_argument("--gpus", metavar="N", type=count, help="slurm, without --on: GPUs of each node")
    parser.add_argument("--hours", metavar="H", type=hours, help="gke, slurm: end a start of the job after this time")


def add_ps_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun ps`."""
    add_project_options(parser)
    parser.add_argument("--all", action="store_true", help="also show resources that cost nothing, and ended runs")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def add_logs_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun logs`."""
    _name(parser)
    parser.add_argument("--host", metavar="N", type=_index, default=0, help="index of the host (default: 0)")
    parser.add_argument("--attempt", metavar="N", type=count, help="number of the attempt (default: the newest)")
    parser.add_argument("--no-follow", action="store_true", help="print the log up to now, and end")
    add_project_options(parser)


def add_stop_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun stop`."""
    _name(parser)
    parser.add_argument("--no-wait", action="store_true", help="end when the stop is requested, before it is done")
    add_project_options(parser)


def add_down_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun down`."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of the run, or the address of its bucket folder")
    parser.add_argument("--all", action="store_true", help="delete the resources of all runs in the project")
    parser.add_argument("--yes", action="store_true", help="do not ask before deleting")
    add_project_options(parser)


def add_fetch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun fetch`."""
    _name(parser)
    parser.add_argument("--to", metavar="FOLDER", help="folder to write (default: runs/NAME)")
    add_project_options(parser)


def add_project_options(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the project whose resources a command uses."""
    parser.add_argument("--project", metavar="ID", help="Google Cloud project (default: that of your login)")


def _name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="name of the run, or the address of its bucket folder, such as gs://bucket/runs/a"
    )


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the index of a host, from 0 on")
    return int(text)
