"""The trainer for one process or many. `ironlaw.train(...)` is `ironlaw.api.train`."""

from ironlaw.package import callable_room

callable_room(__name__)
