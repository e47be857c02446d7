"""Whether a notebook must upgrade packages before it can use forerun, and restart its process afterwards.

Hosted notebooks have their own versions of jax and libtpu. A process keeps the modules that it has imported, so an
upgrade of an imported package takes effect only after a restart. The first cell of each notebook uses this module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from types import ModuleType

# Modules whose `__version__` is that of their distribution. Native code of two versions must not be mixed.
NATIVE = ("jax", "jaxlib", "ml_dtypes", "numpy")
RESTART = (
    "Colab: Runtime > Restart session. Kaggle: Run > Restart & clear cell outputs. Jupyter: Kernel > Restart. "
    "Then run the notebook from this cell, which has nothing to install then."
)
Lookup = Callable[[str], Distribution]


class RestartRequired(Exception):
    """This process has imported packages that were replaced since. Notebooks show only the message."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def outdated_packages(companions: Collection[str] = (), *, find: Lookup = distribution) -> list[str]:
    """Return each requirement of forerun that is not met, such as "jax 0.7.2, but jax>=0.10.2 is required".

    Args:
        companions: Packages that must fit the installed jax, because its extras pin them: `libtpu` for the extra
            `tpu`, `jax-cuda12-plugin` for `cuda12`.
        find: Returns the distribution of a name, or raises `PackageNotFoundError`.
    """
    own = _requirements(find, "forerun")
    from_jax = _requirements(find, "jax")
    required = [text for text, marker in own if "extra" not in marker]
    required += [next((text for text, _ in from_jax if _name(text) == _name(one)), one) for one in companions]
    return [problem for text in required if (problem := _problem(find, text))]


def require_current_imports(before: Mapping[str, str]) -> None:
    """Raise if this process has imported modules of another version than the installed one.

    Args:
        before: The versions of all distributions before the upgrade, by name.

    Raises:
        RestartRequired: The message names the packages and says how to restart.
    """
    replaced = replaced_imports(before)
    if replaced:
        raise RestartRequired(f"Restart the runtime: it still uses the old {', '.join(replaced)}. {RESTART}")


def replaced_imports(
    before: Mapping[str, str],
    installed: Iterable[Distribution] | None = None,
    modules: Mapping[str, ModuleType] | None = None,
) -> list[str]:
    """Return the packages that `modules` still has in an older version, such as "jax 0.7.2 (now 0.12.0)".

    `before` does not show an upgrade in an earlier call, so the `__version__` of modules with native code is compared
    too.
    """
    modules = sys.modules if modules is None else modules
    found = {}
    for one in distributions() if installed is None else installed:
        name, now = _name(one.name), one.version
        then = next((version for key, version in before.items() if _name(key) == name), None)
        module = modules.get(name.replace("-", "_")) if name.replace("-", "_") in NATIVE else None
        loaded = getattr(module, "__version__", now)
        if loaded != now:
            found[name] = f"{name} {loaded} (now {now})"
        elif then not in (None, now) and module is None and _is_imported(one, modules):
            found[name] = f"{name} {then} (now {now})"
    return [found[name] for name in sorted(found)]


def _is_imported(found: Distribution, modules: Mapping[str, ModuleType]) -> bool:
    """Return whether a module of the distribution was imported. Names of namespaces such as `google` do not count."""
    for file in found.files or ():
        if file.suffix not in (".py", ".so"):
            continue
        parts = [*file.parts[:-1], file.name.partition(".")[0]]
        if ".".join(parts[:-1] if parts[-1] == "__init__" else parts) in modules:
            return True
    return False


def _requirements(find: Lookup, name: str) -> list[tuple[str, str]]:
    """Return the requirements of a distribution and their markers, or nothing if it is not installed."""
    try:
        lines = find(name).requires or []
    except PackageNotFoundError:
        return []
    return [(text.strip(), marker) for text, _, marker in (line.partition(";") for line in lines)]


def _problem(find: Lookup, requirement: str) -> str | None:
    name = _name(requirement)
    try:
        version = find(name).version
    except PackageNotFoundError:
        return f"{name} is not installed"
    if meets(version, requirement):
        return None
    limits = ",".join(f"{operator}{limit}" for operator, limit in _conditions(requirement))
    return f"{name} {version}, but {name}{limits} is required"


def meets(version: str, requirement: str) -> bool:
    """Return whether a version meets a requirement such as `jax<=0.10.2,>=0.10.2`."""
    return all(_satisfies(version, operator, limit) for operator, limit in _conditions(requirement))


def _conditions(requirement: str) -> list[tuple[str, str]]:
    return re.findall(r"(>=|<=|==)\s*([\w.*+!]+)", requirement)


def _satisfies(version: str, operator: str, limit: str) -> bool:
    """Return whether a version meets a condition of PEP 440 with `>=`, `<=` or `==`, by its numbers only."""
    if limit.endswith(".*"):
        wanted = _numbers(limit)
        return _numbers(version)[: len(wanted)] == wanted
    here, there = _numbers(version), _numbers(limit)
    length = max(len(here), len(there))
    left, right = (part + (0,) * (length - len(part)) for part in (here, there))
    return {">=": left >= right, "<=": left <= right, "==": left == right}[operator]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _name(requirement: str) -> str:
    """Return the normalized name at the start of a requirement."""
    found = re.match(r"[\w.-]*\w", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else requirement
