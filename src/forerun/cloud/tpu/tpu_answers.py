"""Shapes of the answers of the Cloud TPU API, with the keys that forerun reads."""

from __future__ import annotations

from typing import Any, Required

from typing_extensions import TypedDict

from forerun.cloud.google.answer_shape import GuestAttributes, Labels, Name, OperationError


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
