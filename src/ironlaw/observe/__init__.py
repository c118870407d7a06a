"""Measurement: where the time, the memory and the energy of a run went.

The room can be called, so that a user's own loop needs one line:

    with ironlaw.observe(model, optimizer, out="runs/mine") as watch: ...
"""

from ironlaw.package import callable_room

callable_room(__name__)
