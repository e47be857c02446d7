"""Which slice a trace is for."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import UserError


def require_one_slice(names: Sequence[str], wanted: str | None = None) -> str:
    """Return the slice of a trace: the wanted one, or the only one of `names`.

    Raises:
        UserError: `names` lacks the wanted slice, or none is wanted and there is not exactly one.
    """
    if wanted in names or (wanted is None and len(names) == 1):
        return wanted or names[0]
    planned = f"the plan has {', '.join(names)}" if names else "the plan compares slices of every generation"
    raise UserError(
        "E-PLAN-024",
        "a trace needs one slice" if wanted is None else f"a trace of {wanted} needs a plan of this slice",
        why=f"it shows a step on one device of one slice; {planned}",
        fix=f"name one slice: --on {wanted or (names[0] if names else 'v6e-8')}",
    )
