"""The gap between a plan and a run, its diagnosis, and remedies with their planned gain."""

from ironlaw.explain.explanation import Explanation, explain_run
from ironlaw.package import callable_room

__all__ = ["Explanation", "explain_run"]

callable_room(__name__)
