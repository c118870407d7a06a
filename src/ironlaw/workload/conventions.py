"""A trainer's implementation of a step: which calls are one kernel, and what is saved for the backward pass.

    Shape(model, micro_batch=1, sequence=4096, conventions=OURS)

A `Program` is built under the conventions of one trainer. The defaults are Ironlaw's; those of other trainers are data
(`plan/engines/*.toml`), beside their overlaps and overheads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ironlaw.workload.sizes import Size, is_nonzero

WIDE = 2.0  # bytes of a 16-bit number


@dataclass(frozen=True)
class LinearStorage:
    """Bytes per element or parameter that linear layers hold in the precision of a run."""

    input_bytes: float = WIDE  # per element of a linear layer's input, saved for its backward pass
    attention_copy_bytes: float = 0.0  # per element of attention's output, besides the copy that attention saves
    copy_bytes: float = 0.0  # per weight of a block's matrices, in addition to the 16-bit weights (may be negative)
    gather_bytes: float = WIDE  # per weight that data parallel ranks gather
    description: str = ""


@dataclass(frozen=True)
class Casts:
    """Bytes read and written to quantise the operands of a linear layer, per element and micro-batch."""

    inputs: float = 0.0  # forward
    weights: float = 0.0
    gradients: float = 0.0  # backward: output gradients
    inputs_again: float = 0.0  # backward
    weights_again: float = 0.0


def whole_tiles(tile: int, inputs: Size, outputs: Size) -> bool:
    """Whether inputs and outputs of a linear layer are multiples of the matrix units' `tile`."""
    return tile == 1 or not (is_nonzero(inputs % tile) or is_nonzero(outputs % tile))


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """Conventions of a trainer that change the operations of a block, or the bytes they save."""

    # Autocast: weights, norms and the residual stream are fp32, and products cast their operands. Otherwise everything,
    # weights included, is held in the products' precision.
    autocast: bool = True
    # Fused: gate and up are one product; the activation and its product are one kernel; gradients of one tensor are
    # added by the kernels that compute them; biases, dropout and routing take no time of their own.
    fused: bool = False
    gathered_inputs: float = 0.0  # share of norm outputs kept after gathering over tp
    activation_saves: float = 1.0  # elementwise intermediates kept in the feed-forward network (1 fused, 2 eager)
    unrotated_kept: float = 1.0  # share of unrotated queries and keys saved because values are views of the same buffer
    dropout_mask_bytes: int = 0  # per element of a branch's output, saved for dropout's backward pass
    narrows_own_tokens: bool = False  # latent attention under sequence parallelism gathers narrow vectors, not tokens
    rows_sent: str = "choices"  # a token is sent once per chosen expert, or once per rank with chosen experts ("ranks")
    keeps_expert_outputs: bool = True  # for the gradient of the weights with which they are summed
    storage: LinearStorage = field(default_factory=LinearStorage)  # bytes held by linear layers
    casts: Casts = field(default_factory=Casts)  # traffic of quantising their operands
    tile: int = 1  # layers whose inputs or outputs are not multiples of this are not quantised


OURS = Conventions()
