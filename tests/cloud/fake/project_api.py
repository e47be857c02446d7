"""What `forerun doctor --cloud` asks about a project: permissions, enabled APIs, quota and buckets.

Settings (`FakeCloud.set`): `denied_permissions`: a list; `disabled_services`: a list; `buckets`: {name: location};
`bindings`: those of the IAM policy;
`quotas`: {metric: {place: limit}} of the TPU API, as {"TPUV6EPerProjectPerZoneForTPUAPI": {"us-east5-b": 8}}.
"""

from __future__ import annotations

import re
from typing import Any

from fake.world import ApiFault, World, not_found

Json = dict[str, Any]
IAM = re.compile(r"/(?:v1|v3)/projects/([^/:]+)(?::(\w+))?")
ACCOUNT = re.compile(r"/v1/projects/[^/]+/serviceAccounts/([^/:]+)(?::(\w+))?")
SERVICE = re.compile(
    r"/(v1|v1beta1)/projects/([^/]+)/services(?:/([^/:]+))?(?:/(consumerQuotaMetrics)(?:/(.+))?)?(?::(\w+))?"
)
QUOTA = re.compile(r"/v1/projects/([^/]+)/locations/global/services/([^/]+)/quotaInfos(?:/(\w+))?")
BUCKET = re.compile(r"/(?:storage/v1/)?b/([^/]+)(/iam/testPermissions)?")
SERVICES = ("tpu.googleapis.com", "compute.googleapis.com", "storage.googleapis.com", "iap.googleapis.com")


class ProjectApi:
    def __init__(self, world: World) -> None:
        self.world = world

    def answer(self, method: str, path: str, query: dict[str, str], body: Json) -> Json | None:
        """Return the answer, or None if the URL is not one of these."""
        if match := SERVICE.fullmatch(path):
            return self._services(match, query)
        if match := QUOTA.fullmatch(path):
            return self._quota_infos(match[1], match[2], match[3])
        if (match := IAM.fullmatch(path)) or (match := ACCOUNT.fullmatch(path)):
            if match[2] == "testIamPermissions" and method == "POST":
                return self._allowed(body.get("permissions", []))
            if match[2] == "getIamPolicy" and method == "POST":
                return {"version": 1, "bindings": self.world.settings.get("bindings", [])}
            if match[2] is None and method == "GET":
                return {"projectId": match[1], "projectNumber": "123456", "lifecycleState": "ACTIVE", "name": match[1]}
            return None
        if match := BUCKET.fullmatch(path):
            return self._bucket(match[1], match[2] is not None, query)
        return None

    def resources(self) -> list[Json]:
        return []

    def _allowed(self, permissions: list[str]) -> Json:
        denied = self.world.settings.get("denied_permissions", ())
        allowed = [one for one in permissions if one not in denied]
        return {"permissions": allowed} if allowed else {}

    def _state(self, service: str) -> str:
        return "DISABLED" if service in self.world.settings.get("disabled_services", ()) else "ENABLED"

    def _services(self, match: re.Match[str], query: dict[str, str]) -> Json | None:
        _, project, service, metrics, _, verb = match.groups()
        names = SERVICES if service is None else (service,)
        found = [
            {"name": f"projects/123456/services/{one}", "config": {"name": one}, "state": self._state(one)}
            for one in names
        ]
        if metrics:
            return {"metrics": self._metrics(project, str(service))}
        if service is None:
            wanted = [one for one in found if query.get("filter") != "state:ENABLED" or one["state"] == "ENABLED"]
            return {"services": found if verb == "batchGet" else wanted}
        return found[0]

    def _metrics(self, project: str, service: str) -> list[Json]:
        """Return quota as Service Usage v1beta1 lists it: one metric with a bucket for each place."""
        found = []
        for name, places in self.world.settings.get("quotas", {}).items():
            kind = "zone" if "PerZone" in name else "region"
            buckets = [{"effectiveLimit": str(limit), "dimensions": {kind: place}} for place, limit in places.items()]
            limit = {"name": f"projects/123456/services/{service}/consumerQuotaMetrics/{name}/limits/{name}"}
            limit |= {"metric": f"{service}/{name}", "unit": f"1/{{project}}/{{{kind}}}", "quotaBuckets": buckets}
            found.append({"metric": f"{service}/{name}", "displayName": name, "consumerQuotaLimits": [limit]})
        return found

    def _quota_infos(self, project: str, service: str, item: str | None) -> Json:
        found = []
        for name, places in self.world.settings.get("quotas", {}).items():
            kind = "zone" if "PerZone" in name else "region"
            root = f"projects/{project}/locations/global/services/{service}/quotaInfos/{name}"
            infos = [
                {"dimensions": {kind: place}, "details": {"value": str(limit)}, "applicableLocations": [place]}
                for place, limit in places.items()
            ]
            one = {"name": root, "quotaId": name, "service": service, "dimensions": [kind], "dimensionsInfos": infos}
            found.append(one)
        if item is None:
            return {"quotaInfos": found} if found else {}
        for one in found:
            if one["quotaId"] == item:
                return one
        raise not_found(f"quotaInfos/{item}")

    def _bucket(self, name: str, permissions: bool, query: dict[str, str]) -> Json:
        buckets = self.world.settings.get("buckets", {})
        if name not in buckets:
            raise ApiFault(404, "NOT_FOUND", "The specified bucket does not exist.", "notFound")
        if permissions:
            wanted = query.get("permissions", "").split(",")
            return {"kind": "storage#testIamPermissionsResponse"} | self._allowed(wanted)
        location = buckets[name]
        kind = "multi-region" if location.lower() in ("us", "eu", "asia") else "region"
        return {"kind": "storage#bucket", "name": name, "location": location.upper(), "locationType": kind}
