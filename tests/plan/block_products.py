"""The linear layers of a block as a rank of the first candidate has them, for tests by hand."""

import numpy as np

from ironlaw.ledger import Phase
from ironlaw.workload.kinds import forward_of


def block_products(candidates, engine):
    """By name: outputs, inputs, rows, products side by side."""
    shape, found = candidates.shape(engine), {}
    for kind in candidates.kinds:
        for op in forward_of(shape, kind):
            if op.matmul is not None:
                m, n, k = op.matmul
                found[op.name] = tuple(float(np.reshape(size, -1)[0]) for size in (n, k, m, op.batch))
    return found


def matmul_seconds_of(costs):
    """Of a block of the first candidate: forward, backward."""
    return tuple(float(costs.block["matmul", phase][0]) for phase in (Phase.FORWARD, Phase.BACKWARD))
