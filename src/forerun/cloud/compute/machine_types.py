"""The Compute Engine machine type, image and number of machines of a slice.

Sources: compute/docs/tpus/tpu-machines and compute/docs/gpus of docs.cloud.google.com, and the image families of the
project ubuntu-os-accelerator-images. The TPU generations before v5p exist only in the Cloud TPU API.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.errors import UserError
from forerun.hardware.gpu_names import GPU_COUNTS, gpus_of, usual_machine_type
from forerun.hardware.slices import slice_named

TPU_GENERATIONS = ("v5p", "v6e", "tpu7x")
_IMAGES = "projects/ubuntu-os-accelerator-images/global/images/family/"
_TPU_IMAGE = _IMAGES + "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
_TPU_IMAGES = {"v5p": _TPU_IMAGE, "v6e": _TPU_IMAGE, "tpu7x": _IMAGES + "ubuntu-accel-2404-amd64-tpu-tpu7x"}
_GPU_IMAGE = _IMAGES + "ubuntu-accelerator-2404-amd64-with-nvidia-580"
_CPU_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
# Images need 10 GB. The installed packages (with CUDA), the compile cache and local data need the rest.
_ACCELERATOR_DISK_GIB, _CPU_DISK_GIB = 100, 20
_GPU_MACHINE = re.compile(r"(a2|a3|a4)-([a-z]+)-(\d+)g|g2-standard-(\d+)")
_CPU_MACHINE = re.compile(r"(e2|n1|n2|n2d|c3|c4|t2d)-[a-z]+(-\d+)?")


@dataclass(frozen=True)
class MachineShape:
    """The machines of a slice.

    Attributes:
      machine_type: the type of each machine.
      hosts: the number of machines.
      topology: the shape of a TPU slice of several machines, such as `4x4`; None for one machine.
      chip: the name of the accelerator in chips.csv, or an empty string for a machine without one.
      chips: the number of accelerators of all machines together.
      image: the boot image.
      disk_gib: the size of each boot disk.
    """

    machine_type: str
    hosts: int
    topology: str | None
    chip: str
    chips: int
    image: str
    disk_gib: int

    @property
    def may_migrate(self) -> bool:
        """Return whether the cloud can move the running machine to other hardware."""
        return not self.chip


def is_machine_type(name: str) -> bool:
    """Return whether a name such as `a3-highgpu-8g` is a machine type, and not the name of a TPU slice."""
    return bool(_GPU_MACHINE.fullmatch(name) or _CPU_MACHINE.fullmatch(name))


def rented_name(name: str) -> str:
    """Return the machine type of a GPU machine such as `h100-8`. The names of others are returned unchanged.

    Raises:
      UserError: Compute Engine has no such machine, or the name is that of several slices.
    """
    if is_machine_type(name):
        return name
    found = slice_named(name)
    if found.slices > 1:
        raise several_slices_error(name)
    if found.platform == "tpu":
        return name
    machine_type = usual_machine_type(found.chip.name, found.chips) if found.hosts == 1 else None
    if machine_type is None:
        raise _without_machines(name)
    return machine_type


def several_slices_error(name: str) -> UserError:
    """Return the error for several slices."""
    return UserError(
        "E-CLOUD-091",
        f"{name}: forerun does not start several slices",
        why="it rents one slice; several slices must be created together, and each needs the variables of the others",
        fix="plan them with forerun plan, create them yourself, and start forerun train on each host",
    )


def planned_name(name: str) -> str | None:
    """Return the slice that is planned for a GPU machine type: `h100-8` for `a3-highgpu-8g`; None without one."""
    gpu, gpus = gpus_of(name) or ("", 0)
    return f"{gpu.lower()}-{gpus}" if gpus in GPU_COUNTS else None


def machine_shape(name: str) -> MachineShape:
    """Return the machines of a slice (`v6e-16`, `h100-8`) or of a machine type (`a3-highgpu-8g`, `e2-small`).

    Raises:
      UserError: Compute Engine does not have such machines.
    """
    if _CPU_MACHINE.fullmatch(name):
        return MachineShape(name, 1, None, "", 0, _CPU_IMAGE, _CPU_DISK_GIB)
    name = rented_name(name)
    if _GPU_MACHINE.fullmatch(name):
        if found := gpus_of(name):
            return MachineShape(name, 1, None, *found, _GPU_IMAGE, _ACCELERATOR_DISK_GIB)
    elif (slice := slice_named(name)).chip.name in TPU_GENERATIONS:
        generation = slice.chip.name
        topology = slice.topology.split(":")[1] if slice.hosts > 1 else None
        per_host = slice.chips // slice.hosts
        machine = {
            "v5p": f"ct5p-hightpu-{per_host}t",
            "v6e": f"ct6e-standard-{per_host}t",
            "tpu7x": f"tpu7x-standard-{per_host}t",
        }[generation]
        image = _TPU_IMAGES[generation]
        return MachineShape(machine, slice.hosts, topology, generation, slice.chips, image, _ACCELERATOR_DISK_GIB)
    raise _without_machines(name)


def _without_machines(name: str) -> UserError:
    return UserError(
        "E-CLOUD-020",
        f"Compute Engine has no machines for {name!r}",
        why="it has the TPU generations v5p, v6e and tpu7x, and single GPU machines of the types a2, a3, a4 and g2",
        fix="use the Cloud TPU API for older TPU generations, or another slice: forerun hardware slices",
    )
