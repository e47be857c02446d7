"""Shapes of the answers of Compute Engine, with the keys that forerun reads."""

from __future__ import annotations

from typing import Annotated, Required

from pydantic import Field
from typing_extensions import TypedDict

from forerun.cloud.google.answer_shape import ErrorItem, Labels, Name, OperationError


class MetadataItem(TypedDict, total=False):
    key: str
    value: str


class InstanceMetadata(TypedDict, total=False):
    items: list[MetadataItem]


class Scheduling(TypedDict, total=False):
    provisioningModel: str


class AccessConfig(TypedDict, total=False):
    natIP: str


class NetworkInterface(TypedDict, total=False):
    networkIP: str
    accessConfigs: list[AccessConfig]


class ComputeResource(TypedDict, total=False):
    """What instances, disks, groups, templates and policies have in common."""

    name: Required[Name]
    description: str
    zone: str
    region: str
    labels: Labels
    creationTimestamp: str


class Instance(ComputeResource, total=False):
    status: str
    statusMessage: str
    machineType: str
    metadata: InstanceMetadata
    scheduling: Scheduling
    networkInterfaces: list[NetworkInterface]
    lastStartTimestamp: str
    lastStopTimestamp: str


class Disk(ComputeResource, total=False):
    status: str
    users: list[str]


class Policy(ComputeResource, total=False):
    status: str


class GroupStatus(TypedDict, total=False):
    isStable: bool


class InstanceGroup(ComputeResource, total=False):
    status: GroupStatus
    targetSize: int


class Region(TypedDict, total=False):
    name: Required[Name]
    zones: list[str]


class ErrorList(TypedDict, total=False):
    errors: list[ErrorItem]


class LastAttempt(TypedDict, total=False):
    errors: ErrorList


class ManagedInstance(TypedDict, total=False):
    currentAction: str
    lastAttempt: LastAttempt


class ManagedInstances(TypedDict, total=False):
    managedInstances: list[ManagedInstance]


class ComputeOperation(TypedDict, total=False):
    name: Required[Name]
    status: str
    operationType: str
    targetLink: str
    zone: str
    region: str
    insertTime: str
    endTime: str
    error: OperationError


class ScopeWarning(TypedDict, total=False):
    code: str


class Scope(TypedDict, total=False):
    """The resources of one zone or region in an aggregated list."""

    instances: list[Instance]
    disks: list[Disk]
    instanceGroupManagers: list[InstanceGroup]
    instanceTemplates: list[ComputeResource]
    resourcePolicies: list[Policy]
    warning: ScopeWarning


class AggregatedPage(TypedDict, total=False):
    items: dict[str, Scope]
    unreachables: list[str]


class InstancePage(TypedDict, total=False):
    items: list[Instance]


class DiskPage(TypedDict, total=False):
    items: list[Disk]


class OperationPage(TypedDict, total=False):
    items: list[ComputeOperation]


class Description(TypedDict, total=False):
    """What forerun writes as JSON into the description of a resource."""

    labels: Required[Labels]
    metadata: dict[str, str]
    slice: str
    capacity: str
    zone: str
    hosts: Annotated[int, Field(ge=1, le=4096)]
