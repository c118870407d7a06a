"""The operations of one training step of a decoder: forward, backward, update.

The list mirrors `model/transformer.py` line by line, as PyTorch executes it without fusion. FLOPs equal
`torch.utils.flop_counter` on that module exactly (the counter ignores the causal mask; here a masked score costs
nothing, so causal attention counts half). Saved bytes equal what autograd holds.

Symbols: T = micro-batch x sequence tokens, H hidden, Q and KV widths of all query and key/value heads, F FFN width,
V vocabulary, `w` bytes of a matmul input or output, 4 bytes everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.workload.operations import Operation

Precision = Literal["fp32", "bf16", "fp16"]
FP32 = 4
INDEX = 8  # torch indexes with int64


@dataclass(frozen=True)
class Shape:
    """One micro-batch of one model, and how it is computed."""

    model: ModelConfig
    micro_batch: int  # sequences
    sequence: int  # tokens
    precision: Precision = "fp32"  # of the matrix products; weights and the residual stream stay fp32
    fused_rmsnorm: bool = False  # one kernel on CUDA; on CPU PyTorch composes it from six

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence

    @property
    def matmul_bytes(self) -> int:
        return FP32 if self.precision == "fp32" else 2

    @property
    def casts(self) -> bool:
        return self.precision != "fp32"


def attention_score_pairs(sequence: int, window: int | None) -> int:
    """Twice the (query, key) pairs that count under a causal mask, optionally windowed: S^2, or 2wS - w^2."""
    span = min(window or sequence, sequence)
    return 2 * span * sequence - span * span


def training_operations(shape: Shape) -> list[Operation]:
    """Every call of one micro-batch, forward then backward, in the order of execution (layers folded)."""
    forward = _embedding(shape) + _block(shape) + _head(shape)
    backward = _head_backward(shape) + _block_backward(shape) + _embedding_backward(shape)
    return forward + backward


# -- building blocks ---------------------------------------------------------------------------------------------


def _linear(
    shape: Shape, name: str, group: str, repeat: int, inputs: int, outputs: int, *, keep: bool, bias: bool
) -> list[Operation]:
    """y = x W^T + b. `keep`: somebody downstream saves y, else y is temporary.

    In reduced precision autocast first casts x (from an fp32 producer) and W; W's copy lives until its backward.
    """
    w, tokens = shape.matmul_bytes, shape.tokens
    out_bytes = tokens * outputs * w
    operations = []
    if shape.casts:
        weights = inputs * outputs
        operations.append(
            Operation(
                f"{name}_cast", Kind.ELEMENTWISE, Phase.FORWARD, group, "cast", repeat,
                elements=weights, bytes_moved=weights * (FP32 + w), saved_bytes=weights * w,
            )
        )  # fmt: skip
    operations.append(
        Operation(
            name, Kind.MATMUL, Phase.FORWARD, group, "matmul_bias" if bias else "matmul", repeat,
            matmul=(tokens, outputs, inputs),
            flops=2 * tokens * outputs * inputs,
            bytes_moved=w * (tokens * inputs + inputs * outputs + tokens * outputs),
            saved_bytes=out_bytes if keep else 0,
            temporary_bytes=0 if keep else out_bytes,
        )
    )  # fmt: skip
    return operations


def _linear_backward(
    shape: Shape, name: str, group: str, repeat: int, inputs: int, outputs: int, *, frees: int, bias: bool,
    consumes: int | None = None,
) -> list[Operation]:  # fmt: skip
    """dx = dy W and dW = dy^T x, and the bias gradient: a sum of dy over tokens.

    `frees`: saved bytes (the input x) that die when the node is done; `consumes`: bytes of dy that die with it.
    """
    w, tokens = shape.matmul_bytes, shape.tokens
    dy = tokens * outputs * w if consumes is None else consumes
    flops = 2 * tokens * outputs * inputs
    moved = w * (tokens * inputs + inputs * outputs + tokens * outputs)
    weight_copy = inputs * outputs * w if shape.casts else 0
    weight_gradient = inputs * outputs * FP32
    operations = [
        Operation(
            name, Kind.MATMUL, Phase.BACKWARD, group, "matmul", repeat,
            matmul=(tokens, inputs, outputs), flops=flops, bytes_moved=moved, temporary_bytes=tokens * inputs * w,
        ),
        Operation(
            name, Kind.MATMUL, Phase.BACKWARD, group, "matmul_weight_gradient", repeat,
            matmul=(outputs, inputs, tokens), flops=flops, bytes_moved=moved,
            gradient_bytes=0 if shape.casts else weight_gradient, temporary_bytes=weight_copy,
            frees_saved_bytes=frees + weight_copy,
        ),
    ]  # fmt: skip
    if bias:
        operations.append(
            Operation(
                name, Kind.ELEMENTWISE, Phase.BACKWARD, group, "sum_rows", repeat,
                elements=tokens * outputs, bytes_moved=tokens * outputs * w, gradient_bytes=outputs * FP32,
            )
        )  # fmt: skip
    operations[-1] = replace(operations[-1], frees_temporary_bytes=dy)
    if shape.casts:
        operations.append(
            Operation(
                f"{name}_cast", Kind.ELEMENTWISE, Phase.BACKWARD, group, "cast", repeat,
                elements=inputs * outputs, bytes_moved=weight_copy + weight_gradient,
                gradient_bytes=weight_gradient, frees_temporary_bytes=weight_copy,
            )
        )  # fmt: skip
    return operations


def _norm_saved_bytes(shape: Shape, rows: int, width: int) -> int:
    """Statistics kept by a norm; the composed RMSNorm also keeps the normalised tensor."""
    if shape.model.norm == "layernorm" and width == shape.model.hidden:
        return 2 * rows * FP32
    return rows * FP32 + (0 if shape.fused_rmsnorm else rows * width * FP32)


def _norm(shape: Shape, name: str, group: str, repeat: int, *, reader: str) -> list[Operation]:
    """x (already held by the residual stream) to y; y is saved by `reader`, the linear layer that casts it first."""
    hidden, tokens, w = shape.model.hidden, shape.tokens, shape.matmul_bytes
    full, cast = tokens * hidden * FP32, tokens * hidden * w
    kernel = f"{shape.model.norm}_forward"
    statistics = _norm_saved_bytes(shape, tokens, hidden)
    norm = Operation(
        name, Kind.NORM, Phase.FORWARD, group, kernel, repeat,
        elements=tokens * hidden, bytes_moved=2 * full,
        saved_bytes=statistics + (0 if shape.casts else full), temporary_bytes=full if shape.casts else 0,
    )  # fmt: skip
    if not shape.casts:
        return [norm]
    return [
        norm,
        Operation(
            f"{reader}_cast", Kind.ELEMENTWISE, Phase.FORWARD, group, "cast", repeat,
            elements=tokens * hidden, bytes_moved=full + cast, saved_bytes=cast, frees_temporary_bytes=full,
        ),
    ]  # fmt: skip


def _norm_backward(shape: Shape, name: str, group: str, repeat: int, *, reader: str, residual: bool) -> list[Operation]:
    """dy to dx, then (inside a block) the sum with the gradient that came along the residual connection."""
    hidden, tokens, w = shape.model.hidden, shape.tokens, shape.matmul_bytes
    full = tokens * hidden * FP32
    operations = []
    if shape.casts:
        operations.append(
            Operation(
                f"{reader}_cast", Kind.ELEMENTWISE, Phase.BACKWARD, group, "cast", repeat, elements=tokens * hidden,
                bytes_moved=full + tokens * hidden * w, temporary_bytes=full,
                frees_temporary_bytes=tokens * hidden * w,
            )
        )  # fmt: skip
    statistics = _norm_saved_bytes(shape, tokens, hidden)
    operations.append(
        Operation(
            name, Kind.NORM, Phase.BACKWARD, group, f"{shape.model.norm}_backward", repeat,
            elements=tokens * hidden, bytes_moved=3 * full, temporary_bytes=full, frees_temporary_bytes=full,
            # The norm's input: the residual stream of this point, which nobody needs any more.
            frees_saved_bytes=full + statistics,
            gradient_bytes=shape.model.norm_parameters * FP32,
        )
    )  # fmt: skip
    if residual:
        operations.append(
            Operation(
                "residual", Kind.ELEMENTWISE, Phase.BACKWARD, group, "add_in_place", repeat,
                elements=tokens * hidden, bytes_moved=3 * full, frees_temporary_bytes=full,
            )
        )  # fmt: skip
    return operations


def _residual(shape: Shape, repeat: int) -> Operation:
    """x + f(x): the new stream is saved by the next norm; f(x) dies."""
    elements = shape.tokens * shape.model.hidden
    return Operation(
        "residual", Kind.ELEMENTWISE, Phase.FORWARD, "block", "add", repeat,
        elements=elements, bytes_moved=elements * (2 * FP32 + shape.matmul_bytes),
        saved_bytes=elements * FP32, frees_temporary_bytes=elements * shape.matmul_bytes,
    )  # fmt: skip


def _elementwise(
    shape: Shape, name: str, kernel: str, elements: int, tensors: int, *, backward: bool = False,
    saved: int = 0, temporary: int = 0, frees_saved: int = 0, frees_temporary: int = 0,
) -> Operation:  # fmt: skip
    """`tensors`: how many tensors of `elements` it reads and writes."""
    phase = Phase.BACKWARD if backward else Phase.FORWARD
    return Operation(
        name, Kind.ELEMENTWISE, phase, "block", kernel, shape.model.layers, elements=elements,
        bytes_moved=tensors * elements * shape.matmul_bytes, saved_bytes=saved, temporary_bytes=temporary,
        frees_saved_bytes=frees_saved, frees_temporary_bytes=frees_temporary,
    )  # fmt: skip


# -- embedding ---------------------------------------------------------------------------------------------------


def _embedding(shape: Shape) -> list[Operation]:
    model, tokens = shape.model, shape.tokens
    full = tokens * model.hidden * FP32
    operations = [
        Operation(
            "embedding", Kind.EMBEDDING, Phase.FORWARD, "embedding", "embedding_forward",
            elements=tokens * model.hidden, bytes_moved=2 * full + tokens * INDEX, saved_bytes=full,
        )
    ]  # fmt: skip
    if model.positions == "learned":
        operations.append(
            Operation(
                "positions", Kind.EMBEDDING, Phase.FORWARD, "embedding", "add", elements=tokens * model.hidden,
                bytes_moved=2 * full, temporary_bytes=full, frees_temporary_bytes=full,
            )
        )  # fmt: skip
    return operations


def _embedding_backward(shape: Shape) -> list[Operation]:
    model, tokens = shape.model, shape.tokens
    full, table = tokens * model.hidden * FP32, model.vocab * model.hidden * FP32
    operations = []
    if model.positions == "learned":
        positions = model.context * model.hidden * FP32
        operations.append(
            Operation(
                "positions", Kind.EMBEDDING, Phase.BACKWARD, "embedding", "sum_rows", elements=tokens * model.hidden,
                bytes_moved=full + positions, gradient_bytes=positions,
            )
        )  # fmt: skip
    operations.append(
        Operation(
            "embedding", Kind.EMBEDDING, Phase.BACKWARD, "embedding", "embedding_backward",
            elements=tokens * model.hidden, bytes_moved=2 * full + table,
            # A tied table already has the head's gradient: this one is a second copy until they are added.
            gradient_bytes=0 if model.tied else table,
            temporary_bytes=table if model.tied else 0,
            frees_temporary_bytes=full + (table if model.tied else 0),
        )
    )  # fmt: skip
    if model.tied:
        operations.append(
            Operation(
                "embedding", Kind.EMBEDDING, Phase.BACKWARD, "embedding", "add_in_place",
                elements=model.vocab * model.hidden, bytes_moved=3 * table,
            )
        )  # fmt: skip
    return operations


# -- one transformer block, repeated `layers` times --------------------------------------------------------------


def _attention_saved_bytes(shape: Shape) -> int:
    """Output and the log-sum-exp per query that a flash kernel keeps (arXiv 2205.14135), and a window's mask."""
    model = shape.model
    windowed = model.sliding_window is not None and model.sliding_window < shape.sequence
    mask = shape.sequence * shape.sequence * shape.matmul_bytes if windowed else 0
    return shape.tokens * model.query_size * shape.matmul_bytes + shape.tokens * model.heads * FP32 + mask


def _rotary_bytes(shape: Shape) -> int:
    """Rotated copies of query and key; the unrotated ones stay because value is a view of the same buffer."""
    model = shape.model
    if model.positions != "rope":
        return 0
    tables = 2 * shape.sequence * model.size_of_head * shape.matmul_bytes if shape.casts else 0
    return tables + shape.tokens * (model.query_size + model.key_value_size) * shape.matmul_bytes


def _qk_norm_saved_bytes(shape: Shape) -> int:
    model = shape.model
    if not model.qk_norm:
        return 0
    heads = model.heads + model.key_value_heads
    elements = shape.tokens * heads * model.size_of_head
    norms = _norm_saved_bytes(shape, shape.tokens * heads, model.size_of_head)
    # The norm works in fp32: in reduced precision its input is a cast copy. Its output feeds the rotation, which
    # saves only the tables, or else attention, which saves it.
    cast_input = elements * FP32 if shape.casts else 0
    output = 0 if model.positions == "rope" else elements * shape.matmul_bytes
    return norms + cast_input + output


def _attention(shape: Shape, phase: Phase) -> Operation:
    model = shape.model
    pairs = attention_score_pairs(shape.sequence, model.sliding_window)
    backward = phase is Phase.BACKWARD
    # Forward: QK^T and PV. Backward: the two gradients of each. A flash kernel recomputes the scores on top; that
    # is work of the implementation, not of the model, and is not counted.
    flops = (2 if backward else 1) * 2 * shape.micro_batch * model.query_size * pairs
    w, tokens = shape.matmul_bytes, shape.tokens
    inputs = tokens * (model.query_size + 2 * model.key_value_size) * w
    outputs = tokens * model.query_size * w
    return Operation(
        "attention", Kind.ATTENTION, phase, "block", f"attention_{phase}", model.layers,
        attention=(shape.micro_batch, shape.sequence, model.heads, model.key_value_heads, model.size_of_head),
        flops=flops, elements=shape.micro_batch * model.heads * pairs // 2,
        bytes_moved=(2 * inputs + 2 * outputs) if backward else inputs + outputs,
        saved_bytes=0 if backward else _attention_saved_bytes(shape),
        temporary_bytes=inputs if backward else 0,
        frees_saved_bytes=(_attention_saved_bytes(shape) + _rotary_bytes(shape)) if backward else 0,
        frees_temporary_bytes=outputs if backward else 0,
    )  # fmt: skip


def _block(shape: Shape) -> list[Operation]:
    model, tokens, w, layers = shape.model, shape.tokens, shape.matmul_bytes, shape.model.layers
    qkv, heads = model.query_size + 2 * model.key_value_size, model.query_size + model.key_value_size
    ffn, normed = tokens * model.ffn_size, tokens * model.hidden * w
    operations = _norm(shape, "attention_norm", "block", layers, reader="qkv")
    operations += _linear(shape, "qkv", "block", layers, model.hidden, qkv, keep=True, bias=model.has_qkv_bias)
    if model.qk_norm:
        operations.append(
            replace(
                _elementwise(
                    shape, "qk_norm", "rmsnorm_forward", tokens * heads, 2,
                    saved=_qk_norm_saved_bytes(shape),
                ),
                kind=Kind.NORM,
            )
        )  # fmt: skip
    if model.positions == "rope":
        operations.append(_elementwise(shape, "rotary", "rotary", tokens * heads, 2, saved=_rotary_bytes(shape)))
    operations.append(_attention(shape, Phase.FORWARD))
    operations += _linear(
        shape, "attention_out", "block", layers, model.query_size, model.hidden, keep=False, bias=model.bias
    )
    operations.append(_residual(shape, layers))
    operations += _norm(shape, "ffn_norm", "block", layers, reader="ffn_gate" if model.gated_ffn else "ffn_up")
    if model.gated_ffn:
        operations += _linear(
            shape, "ffn_gate", "block", layers, model.hidden, model.ffn_size, keep=True, bias=model.bias
        )
    if not model.gated_ffn:
        operations += _linear(
            shape, "ffn_up", "block", layers, model.hidden, model.ffn_size, keep=True, bias=model.bias
        )
    operations.append(_elementwise(shape, "activation", f"{model.activation}_forward", ffn, 2, saved=ffn * w))
    if model.gated_ffn:
        if shape.casts:  # autocast does not remember the cast that the gate has already made of the same input
            operations.append(_elementwise(shape, "ffn_up_cast", "cast", tokens * model.hidden, 3, saved=normed))
        operations += _linear(
            shape, "ffn_up", "block", layers, model.hidden, model.ffn_size, keep=True, bias=model.bias
        )
        operations.append(_elementwise(shape, "gate_product", "multiply", ffn, 3, saved=ffn * w))
    operations += _linear(shape, "ffn_down", "block", layers, model.ffn_size, model.hidden, keep=False, bias=model.bias)
    operations.append(_residual(shape, layers))
    return operations


def _block_backward(shape: Shape) -> list[Operation]:
    """Exactly `_block` in reverse: what was saved there is freed here."""
    model, tokens, w, layers = shape.model, shape.tokens, shape.matmul_bytes, shape.model.layers
    qkv, heads = model.query_size + 2 * model.key_value_size, model.query_size + model.key_value_size
    ffn, normed = tokens * model.ffn_size, tokens * model.hidden * w
    # The gradient of the residual stream stays alive beside the branch, so dy of the branch frees nothing; in
    # reduced precision the branch works on its own cast copy.
    cast_dy = tokens * model.hidden * w if shape.casts else 0
    operations = []
    if shape.casts:
        operations.append(_cast_gradient(shape))
    operations += _linear_backward(
        shape, "ffn_down", "block", layers, model.ffn_size, model.hidden,
        frees=ffn * w, bias=model.bias, consumes=cast_dy,
    )  # fmt: skip
    if model.gated_ffn:
        operations.append(
            _elementwise(
                shape, "gate_product", "multiply_backward", ffn, 6, backward=True,
                temporary=2 * ffn * w, frees_saved=2 * ffn * w, frees_temporary=ffn * w,
            )
        )  # fmt: skip
        operations += _linear_backward(
            shape,
            "ffn_up",
            "block",
            layers,
            model.hidden,
            model.ffn_size,
            frees=normed if shape.casts else 0,
            bias=model.bias,
        )
    operations.append(
        _elementwise(
            shape, "activation", f"{model.activation}_backward", ffn, 3, backward=True,
            temporary=ffn * w, frees_saved=ffn * w, frees_temporary=ffn * w,
        )
    )  # fmt: skip
    first = "ffn_gate" if model.gated_ffn else "ffn_up"
    operations += _linear_backward(
        shape, first, "block", layers, model.hidden, model.ffn_size, frees=normed, bias=model.bias
    )
    if model.gated_ffn:
        operations.append(
            _elementwise(
                shape, "ffn_norm", "add_in_place", tokens * model.hidden, 3, backward=True, frees_temporary=normed
            )
        )
    operations += _norm_backward(shape, "ffn_norm", "block", layers, reader=first, residual=True)
    if shape.casts:
        operations.append(_cast_gradient(shape))
    operations += _linear_backward(
        shape, "attention_out", "block", layers, model.query_size, model.hidden,
        frees=0, bias=model.bias, consumes=cast_dy,
    )  # fmt: skip
    operations.append(_attention(shape, Phase.BACKWARD))
    # Gradients of query, key and value are gathered into one buffer shaped like the qkv output.
    gathered = tokens * qkv * w
    if model.positions == "rope":
        operations.append(_elementwise(shape, "rotary", "rotary", tokens * heads, 2, backward=True))
    if model.qk_norm:
        operations.append(
            replace(
                _elementwise(
                    shape, "qk_norm", "rmsnorm_backward", tokens * heads, 3, backward=True,
                    frees_saved=_qk_norm_saved_bytes(shape),
                ),
                kind=Kind.NORM,
                gradient_bytes=2 * model.size_of_head * FP32,
            )
        )  # fmt: skip
    operations.append(
        _elementwise(
            shape, "qkv", "concatenate", tokens * qkv, 2, backward=True,
            temporary=gathered, frees_saved=gathered, frees_temporary=gathered,
        )
    )  # fmt: skip
    operations += _linear_backward(
        shape, "qkv", "block", layers, model.hidden, qkv, frees=normed, bias=model.has_qkv_bias
    )
    operations += _norm_backward(shape, "attention_norm", "block", layers, reader="qkv", residual=True)
    return operations


def _cast_gradient(shape: Shape) -> Operation:
    elements = shape.tokens * shape.model.hidden
    return Operation(
        "residual_cast", Kind.ELEMENTWISE, Phase.BACKWARD, "block", "cast", shape.model.layers, elements=elements,
        bytes_moved=elements * (FP32 + shape.matmul_bytes), temporary_bytes=elements * shape.matmul_bytes,
    )  # fmt: skip


# -- output layer and loss ---------------------------------------------------------------------------------------


def _head(shape: Shape) -> list[Operation]:
    model, tokens = shape.model, shape.tokens
    logits = tokens * model.vocab
    operations = _norm(shape, "final_norm", "head", 1, reader="head")
    operations += _linear(shape, "head", "head", 1, model.hidden, model.vocab, keep=False, bias=False)
    if shape.casts:
        operations.append(
            Operation(
                "loss", Kind.LOSS, Phase.FORWARD, "head", "cast", elements=logits,
                bytes_moved=logits * (FP32 + shape.matmul_bytes), temporary_bytes=logits * FP32,
                frees_temporary_bytes=logits * shape.matmul_bytes,
            )
        )  # fmt: skip
    operations.append(
        Operation(
            "loss", Kind.LOSS, Phase.FORWARD, "head", "loss_forward", elements=logits,
            bytes_moved=2 * logits * FP32, saved_bytes=logits * FP32, frees_temporary_bytes=logits * FP32,
        )
    )  # fmt: skip
    return operations


def _head_backward(shape: Shape) -> list[Operation]:
    model, tokens, w = shape.model, shape.tokens, shape.matmul_bytes
    logits = tokens * model.vocab
    operations = [
        Operation(
            # Two gradients of the logits' size beside the saved log-probabilities: often the peak of the step.
            "loss", Kind.LOSS, Phase.BACKWARD, "head", "loss_backward", elements=logits,
            bytes_moved=4 * logits * FP32, temporary_bytes=2 * logits * FP32,
            frees_saved_bytes=logits * FP32, frees_temporary_bytes=logits * FP32,
        )
    ]  # fmt: skip
    if shape.casts:
        operations.append(
            Operation(
                "loss", Kind.LOSS, Phase.BACKWARD, "head", "cast", elements=logits,
                bytes_moved=logits * (FP32 + w), temporary_bytes=logits * w, frees_temporary_bytes=logits * FP32,
            )
        )  # fmt: skip
    operations += _linear_backward(
        shape, "head", "head", 1, model.hidden, model.vocab, frees=tokens * model.hidden * w, bias=False
    )
    operations += _norm_backward(shape, "final_norm", "head", 1, reader="head", residual=False)
    return operations


# -- once per step -----------------------------------------------------------------------------------------------


def optimizer_operations(model: ModelConfig, *, accumulation: int = 1) -> list[Operation]:
    """Gradient clipping by global norm and AdamW (arXiv 1711.05101), fused; fp32 states."""
    parameters = model.parameters
    gradient = parameters * FP32

    def step(name: str, kernel: str, bytes_moved: int) -> Operation:
        return Operation(
            name, Kind.OPTIMIZER, Phase.OPTIMIZER, "optimizer", kernel, elements=parameters, bytes_moved=bytes_moved
        )

    # The norm reads every gradient, the scaling reads and writes it.
    operations = [step("clip", "clip", 3 * gradient)]
    # AdamW reads and writes weight and two moments, and reads the gradient.
    operations.append(step("adamw", "adamw", 7 * gradient))
    # On top, what clipping and updating cost per tensor however small it is.
    operations.append(
        Operation(
            "adamw", Kind.OPTIMIZER, Phase.OPTIMIZER, "optimizer", "update_tensors", elements=model.parameter_tensors
        )
    )
    if accumulation > 1:
        # From the second micro-batch on, every gradient is added to the one already there.
        operations.append(
            Operation(
                "accumulate", Kind.ELEMENTWISE, Phase.BACKWARD, "optimizer", "add_in_place", accumulation - 1,
                elements=parameters, bytes_moved=3 * gradient,
            )
        )  # fmt: skip
    return operations
