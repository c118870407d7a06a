"""Predictions: memory, time and cost of a run before it starts. `ironlaw.plan(...)` is `ironlaw.api.plan`."""

import ironlaw

ironlaw.callable_room(__name__)
