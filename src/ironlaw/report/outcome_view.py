"""Whatever was planned, as documents."""

from __future__ import annotations

from typing import Any

from ironlaw.report.cluster_view import assumed_view, cluster_view, cluster_why_view, ranks_view
from ironlaw.report.document import Document
from ironlaw.report.plan_view import plan_view, why_view
from ironlaw.report.serving_view import serving_view


def plan_views(outcome: Any, why: bool = False) -> list[Document]:
    """Of a `PlanOutcome`: of training here or on a cluster, or of serving."""
    ledger, more = outcome.ledger, outcome.more
    assumed = assumed_view(more.get("assumed", []))
    if "served" in more:
        return [serving_view(ledger, more), assumed]
    if "cluster" in more:
        return [cluster_view(ledger, outcome.fits, more), *([cluster_why_view(ledger, more)] if why else [])]
    return [plan_view(ledger, outcome.fits), ranks_view(ledger, more), assumed, *([why_view(ledger)] if why else [])]
