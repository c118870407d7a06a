"""One trainer for one process or many. `ironlaw.train(...)` is `ironlaw.api.train`."""

import ironlaw

ironlaw.callable_room(__name__)
