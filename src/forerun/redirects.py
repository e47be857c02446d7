"""The decision which redirects of a web server are followed, for all clients that forerun uses.

The user names the first address. A server chooses where a redirect leads, and it could choose the metadata server of
the machine or a service of the local network. A redirect is followed

- to the same scheme, host and port, and on loopback to another port of the same host,
- to https on the same host, or on another host whose addresses are all public.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from forerun.errors import UserError
from forerun.safe_text import clean

_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last 32 bits are an IPv4 address


def check_redirect(source: str, target: str) -> None:
    """Raise UserError if a redirect must not be followed. The name of the target's host is resolved.

    Args:
      source: the address that answered.
      target: the address that it names.
    """
    try:
        old, new = urlsplit(source), urlsplit(target)
        same_origin = _origin(old) == _origin(new)
    except ValueError as error:
        raise _refusal(source, target, str(error)) from error
    if same_origin:
        return
    same_host = old.hostname == new.hostname
    if same_host and new.scheme in _PORTS and _is_loopback(str(new.hostname)):
        return
    if new.scheme != "https" or not new.hostname:
        raise _refusal(source, target, "it does not lead to https, so anyone on the network path could change the data")
    if not same_host:
        check_addresses(source, target, _resolved(new.hostname))


def leaves_host(source: str, target: str) -> bool:
    """Return whether a redirect leads to another host, whose addresses must be public."""
    return urlsplit(source).hostname != urlsplit(target).hostname


def check_addresses(source: str, target: str, addresses: Sequence[str]) -> None:
    """Raise UserError if one of the addresses of a redirect's host is not public."""
    for address in addresses:
        if not is_public(address):
            raise _refusal(source, target, f"it leads to {address}, which is not a public address")


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet."""
    ip: Any = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour
        ip = embedded or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip)
    return bool(ip.is_global) and not ip.is_multicast


class RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Redirects of urllib. Credentials are not sent to another host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        try:
            check_redirect(req.full_url, newurl)
        except UserError:
            fp.close()
            raise
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and leaves_host(req.full_url, newurl):
            request.remove_header("Authorization")
        return request


class HttpxGuard:
    """A hook for the responses of an httpx client.

    httpx resolves the name of the next host again, so the address of the connection is checked too.
    """

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}  # the last address that redirected to a host

    def __call__(self, response: Any) -> None:
        url = str(response.request.url)
        host = str(urlsplit(url).hostname)
        source = self._sources.get(host)
        if source is not None and not _uses_proxy(url):
            stream = response.extensions.get("network_stream")
            peer = stream.get_extra_info("server_addr") if stream is not None else None
            if peer:
                check_addresses(source, url, [peer[0]])
        location = response.headers.get("location")
        if location and 300 <= response.status_code < 400:
            target = _target(url, location)
            check_redirect(url, target)
            if leaves_host(url, target):
                self._sources[str(urlsplit(target).hostname)] = url


async def aiohttp_client(**settings: Any) -> Any:
    """Return a session of aiohttp that checks redirects, with the arguments of `fsspec`'s `get_client`."""
    import aiohttp

    sources: dict[str, str] = {}  # the last address that redirected to a host

    async def check(session: Any, context: Any, redirect: Any) -> None:
        url = str(redirect.response.url)
        location = redirect.response.headers.get("Location") or redirect.response.headers.get("URI") or ""
        target = _target(url, location)
        await asyncio.to_thread(check_redirect, url, target)
        if leaves_host(url, target):
            sources[str(urlsplit(target).hostname)] = url

    class Resolver(aiohttp.ThreadedResolver):
        """Checks the addresses that the connection uses: a name may resolve to others than before."""

        async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
            entries = await super().resolve(host, port, family)
            if host in sources:
                check_addresses(sources[host], f"https://{host}", [entry["host"] for entry in entries])
            return entries

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check)
    settings = {"connector": aiohttp.TCPConnector(resolver=Resolver()), **settings}
    return aiohttp.ClientSession(**settings, trace_configs=[trace])


def refused_redirect(error: BaseException | None) -> UserError | None:
    """Return the error of `check_redirect` that caused `error`, or None."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def _origin(url: SplitResult) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port. Raise ValueError if the port is not a number."""
    return url.scheme, url.hostname, url.port or _PORTS.get(url.scheme)


def _target(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise _refusal(url, location, str(error)) from error


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _resolved(host: str) -> list[str]:
    """Return the addresses of a host. It has none here if only a proxy can resolve its name."""
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _uses_proxy(url: str) -> bool:
    split = urlsplit(url)
    proxies = urllib.request.getproxies()
    has_proxy = split.scheme in proxies or "all" in proxies
    return has_proxy and not urllib.request.proxy_bypass(str(split.hostname))


def _refusal(source: str, target: str, why: str) -> UserError:
    return UserError(
        "E-DATA-222",
        f"{clean(source)} redirects to {clean(target)}, and this redirect is not followed",
        why=why,
        fix="if you trust the second address, name it in place of the first one, or fetch the file with curl",
    )
