"""Predictions: memory, time and cost of a run before it starts. `ironlaw.plan(...)` is `ironlaw.api.plan`."""

from ironlaw.package import callable_room

callable_room(__name__)
