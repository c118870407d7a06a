"""What a trainer makes of the arithmetic of a step: which calls are one kernel, what waits for the backward pass.

    Shape(model, micro_batch=1, sequence=4096, conventions=OURS)

A `Program` is built under the conventions of one trainer. Ours are the defaults; those of other trainers are data
(`plan/engines/*.toml`), with what they hide and lose beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ironlaw.workload.sizes import Size, any_of

WIDE = 2.0  # bytes of a 16-bit number


@dataclass(frozen=True)
class StorageFormat:
    """Bytes per element or parameter that linear layers keep in the precision of a run."""

    input_bytes: float = WIDE  # of a linear layer's input, kept for its backward pass
    attention_copy_bytes: float = 0.0  # of attention's output, beside the one that attention keeps
    copy_bytes: float = 0.0  # per weight of a block's matrices, more (or less) than the 16-bit ones alone
    gather_bytes: float = WIDE  # per weight that data parallel ranks gather
    description: str = ""


@dataclass(frozen=True)
class Casts:
    """Bytes read and written to quantise what a linear layer multiplies, per element of each and micro-batch."""

    inputs: float = 0.0  # forward
    weights: float = 0.0
    gradients: float = 0.0  # backward, of the output
    inputs_again: float = 0.0
    weights_again: float = 0.0


def whole_tiles(tile: int, inputs: Size, outputs: Size) -> bool:
    """Whether matrix units that work on so many rows and columns at a time take a linear layer of these sizes."""
    return tile == 1 or not (any_of(inputs % tile) or any_of(outputs % tile))


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """Conventions of a trainer that change the operations of a block, or what they keep."""

    # Autocast: weights, norms and the residual stream are fp32, products cast what they take. Else all is as wide as
    # the products, and their weights are there in that width.
    autocast: bool = True
    # Fused: gate and up are one product, the activation and its product one kernel, gradients that meet are added by
    # the kernels that make them, biases, dropout and routing take no time of their own.
    fused: bool = False
    gathered_inputs: float = 0.0  # share of norm outputs kept after gathering over tp
    activation_saves: float = 1.0  # elementwise intermediates kept in the feed-forward network (1 fused, 2 eager)
    unrotated_kept: float = 1.0  # of queries and keys before rotation: values that are a view of their product keep it
    dropout_mask_bytes: int = 0  # per element of what a branch adds, kept for dropout's backward pass
    narrows_own_tokens: bool = False  # latent attention under sequence parallelism: gathers what was narrowed
    rows_sent: str = "choices"  # to experts: a token once per "choices", or once per "ranks" that hold some of them
    keeps_expert_outputs: bool = True  # for the gradient of the weights that they are added up with
    storage: StorageFormat = field(default_factory=StorageFormat)  # what linear layers keep in the precision of the run
    casts: Casts = field(default_factory=Casts)  # what quantising them moves
    tile: int = 1  # what inputs and outputs of a layer are multiples of; others are not quantised


OURS = Conventions()
