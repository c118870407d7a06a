"""What an optimizer keeps and does per parameter of one model, for the cluster planner.

    cost = update_cost("muon", model)
    cost.block_state_bytes, cost.end_state_bytes        # per parameter of a block, of embedding and output layer
    cost.block_bytes                                    # bytes that an update moves per parameter
    cost.matrices                                       # matrix products per block: Newton-Schulz, projections

State and operations are those of `workload/optimizers.py`, from the parameters' shapes. An update of AdamW moves 34
bytes per parameter here (states, master weight, 16-bit weight, gradient for its norm); others differ by what their own
operations move more or less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

from ironlaw.errors import UserError, did_you_mean
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import Parameter, elements_of, of_blocks, of_embedding, of_head
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import OptimizerConfig, OptimizerName, state_bytes, update_operations

ADAMW_BYTES = 34.0  # moved per parameter: 7 fp32 tensors, the 16-bit weight, the fp32 gradient once more


@dataclass(frozen=True)
class UpdateCost:
    """Bytes are per parameter. `matrices`: (m, n, k, times per block) of products in bf16."""

    name: str = "adamw"
    block_state_bytes: float = 8.0
    end_state_bytes: float = 8.0  # embedding, output layer, final norm
    block_bytes: float = ADAMW_BYTES
    end_bytes: float = ADAMW_BYTES
    matrices: tuple[tuple[int, int, int, int], ...] = ()
    owners: int = 1  # matrices of a block: the finest that whole-matrix work can be dealt out


ADAMW = UpdateCost()
NAMES = get_args(OptimizerName)


def update_cost(name: str, model: ModelConfig) -> UpdateCost:
    """The cost of optimizer `name` on this model. UserError for a name that is none."""
    if name not in NAMES:
        raise UserError(f"unknown optimizer '{name}': {did_you_mean(name, NAMES)}")
    if name in ("adam", "adamw"):
        return ADAMW
    block, ends = of_blocks(model, [0]), of_embedding(model) + of_head(model)
    config = OptimizerConfig(name=cast(OptimizerName, name))
    products = [op for op in update_operations(block, config, cuda=True) if op.matmul is not None]
    return UpdateCost(
        name,
        block_state_bytes=state_bytes(block, config) / elements_of(block),
        end_state_bytes=state_bytes(ends, config) / elements_of(ends),
        block_bytes=_moved(block, config),
        end_bytes=_moved(ends, config),
        matrices=tuple((*op.matmul, op.repeat) for op in products if op.matmul is not None),
        owners=sum(p.is_block_matrix for p in block),
    )


def _moved(parameters: list[Parameter], config: OptimizerConfig) -> float:
    """Bytes per parameter of element-wise kernels, in place of AdamW's."""
    own = _streamed(update_operations(parameters, config, cuda=True))
    usual = _streamed(update_operations(parameters, OptimizerConfig(), cuda=True))
    return ADAMW_BYTES + (own - usual) / elements_of(parameters)


def _streamed(operations: list[Operation]) -> float:
    return float(sum(op.bytes_moved * op.repeat for op in operations if op.matmul is None))
