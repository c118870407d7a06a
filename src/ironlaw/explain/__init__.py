"""The gap between a plan and a run, its diagnosis, and remedies with their planned gain."""

import ironlaw
from ironlaw.explain.explanation import Explanation, explain_run

__all__ = ["Explanation", "explain_run"]

ironlaw.callable_room(__name__)
