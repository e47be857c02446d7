"""Whether the data fills a batch."""

from __future__ import annotations

from forerun.data.order.mixture import Mixture
from forerun.data.order.rows import PackedRows
from forerun.errors import UserError


def require_one_batch(rows: PackedRows | Mixture, batch: int) -> None:
    """Reject data with fewer rows than a batch has: a step would contain a row twice."""
    if len(rows) < batch:
        raise UserError(
            f"the data is smaller than one batch: {len(rows)} rows, batch {batch}",
            why=f"the documents make {len(rows)} rows of {rows.sequence} tokens",
            fix=f"batch={len(rows)}, a shorter sequence, or more text"
            if len(rows)
            else "a shorter sequence, or more text",
        )
