"""Terminal reports: pure functions from data and a console to text. They calculate nothing but shares."""

from ironlaw.report.explanation_view import show_explanation
from ironlaw.report.plan_view import show_plan, show_why
from ironlaw.report.profile_view import show_profile

__all__ = ["show_explanation", "show_plan", "show_profile", "show_why"]
