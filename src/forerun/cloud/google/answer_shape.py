"""Shapes of the answers of Google's APIs. A shape is a TypedDict with the keys that forerun reads.

An answer of another shape counts as a failed call. Keys that a shape does not name may have any value.
"""

from __future__ import annotations

from functools import cache
from typing import (
    Annotated,
    Any,
    Required,  # pydantic needs this one before Python 3.12
)

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

# A name becomes part of paths.
Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x20\x7f?#%]+$")]
Labels = dict[str, str]


class AnyAnswer(TypedDict, total=False):
    """A JSON object."""


class NamedResource(TypedDict, total=False):
    name: Required[Name]


class ErrorItem(TypedDict, total=False):
    code: str
    message: str
    reason: str


class OperationError(TypedDict, total=False):
    """The error of the Cloud TPU API (a code and a message) or of Compute Engine (a list of errors)."""

    code: int
    message: str
    details: list[dict[str, Any]]
    errors: list[ErrorItem]


class GuestAttribute(TypedDict, total=False):
    key: str
    value: str


class GuestItems(TypedDict, total=False):
    items: list[GuestAttribute]


class GuestAttributes(TypedDict, total=False):
    queryValue: GuestItems


def shape_problem(content: object, shape: Any) -> str:
    """Return why a JSON value does not have a shape, or an empty string if it has it."""
    try:
        _reader(shape).validate_python(content, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{'.'.join(map(str, problem['loc'])) or 'the answer'}: {problem['msg']}"[:300]
    except RecursionError:
        return "the answer is nested too deeply"
    return ""


@cache
def _reader(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


class AcceleratorConfig(TypedDict, total=False):
    type: str
    topology: str


class ExternalAccess(TypedDict, total=False):
    externalIp: str


class Endpoint(TypedDict, total=False):
    ipAddress: str
    accessConfig: ExternalAccess


class NodeSymptom(TypedDict, total=False):
    symptomType: str


class NodeBody(TypedDict, total=False):
    state: str
    health: str
    healthDescription: str
    symptoms: list[NodeSymptom]
    labels: Labels
    metadata: dict[str, str]
    acceleratorType: str
    acceleratorConfig: AcceleratorConfig
    schedulingConfig: dict[str, Any]
    networkEndpoints: list[Endpoint]
    createTime: str


class Node(NodeBody, total=False):
    name: Required[Name]


class NodeSpec(TypedDict, total=False):
    node: NodeBody


class Tpu(TypedDict, total=False):
    nodeSpec: list[NodeSpec]


class FailedData(TypedDict, total=False):
    error: OperationError


class QueueState(TypedDict, total=False):
    state: str
    failedData: FailedData


class QueuedResource(TypedDict, total=False):
    name: Required[Name]
    state: QueueState
    tpu: Tpu
    schedulingConfig: dict[str, Any]
    createTime: str


class OperationMetadata(TypedDict, total=False):
    verb: str
    target: str
    createTime: str
    endTime: str


class Operation(TypedDict, total=False):
    name: Required[Name]
    done: bool
    error: OperationError
    metadata: OperationMetadata


class NodePage(TypedDict, total=False):
    nodes: list[Node]
    unreachable: list[str]


class QueuePage(TypedDict, total=False):
    queuedResources: list[QueuedResource]
    unreachable: list[str]


class TpuOperationPage(TypedDict, total=False):
    operations: list[Operation]


class HostAttributes(TypedDict, total=False):
    guestAttributes: list[GuestAttributes]


NODES, QUEUE = "nodes", "queuedResources"
RESOURCES = {NODES: Node, QUEUE: QueuedResource}
PAGES = {NODES: NodePage, QUEUE: QueuePage}


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
