"""The http client of the hub's library, with a check of redirects."""

from __future__ import annotations

from typing import Any

from forerun.redirects import HttpxGuard


def guard_client() -> None:
    """Make all requests of the hub's library check redirects. Repeating it changes nothing."""
    from huggingface_hub.utils import _http

    factory = _http._GLOBAL_CLIENT_FACTORY
    if getattr(factory, "checks_redirects", False):
        return

    def guarded() -> Any:
        client = factory()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks["response"], HttpxGuard()]}
        return client

    guarded.checks_redirects = True  # type: ignore[attr-defined]
    _http.set_client_factory(guarded)
