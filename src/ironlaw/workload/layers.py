"""Single layers of a decoder, forward and backward: linear layers, norms, the residual stream.

Symbols as in `transformer.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ironlaw.ledger import Kind, Phase
from ironlaw.workload.blocks import FP32, Shape, dropout, elementwise, norm_saved_bytes
from ironlaw.workload.conventions import Casts
from ironlaw.workload.operations import Operation
from ironlaw.workload.sizes import Size


def linear(
    shape: Shape, name: str, group: str, repeat: int, inputs: Size, outputs: Size, *, keep: bool, bias: bool,
    rows: Size | None = None,
) -> list[Operation]:  # fmt: skip
    """y = x W^T + b of `rows` tokens, all unless given. `keep`: somebody downstream saves y, else y is temporary.

    In reduced precision autocast first casts x (from an fp32 producer) and W; W's copy lives until its backward.
    """
    w, tokens = shape.matmul_bytes, rows if rows is not None else shape.tokens
    out_bytes = tokens * outputs * w
    operations = quantised(shape, name, group, repeat, Phase.FORWARD, tokens, inputs, outputs)
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


def quantised(
    shape: Shape, name: str, group: str, repeat: int, phase: Phase, rows: Size, inputs: Size, outputs: Size,
    batch: Size = 1,
) -> list[Operation]:  # fmt: skip
    """What a product of 8 or 4 bits costs beside itself: casts of its operands, in a block's linear layers only."""
    casts, weights = shape.conventions.casts, inputs * outputs * batch
    if casts == Casts() or group == "head" or name in ("router", "shared_gate"):
        return []
    if phase is Phase.FORWARD:
        moved = casts.inputs * rows * inputs * batch + casts.weights * weights
    else:
        moved = casts.gradients * rows * outputs * batch + casts.inputs_again * rows * inputs * batch
        moved = moved + casts.weights_again * weights
    return [Operation(f"{name}_cast", Kind.ELEMENTWISE, phase, group, "quantise", repeat, bytes_moved=moved)]


def norm(shape: Shape, name: str, group: str, repeat: int, *, reader: str) -> list[Operation]:
    """x (already held by the residual stream) to y; y is saved by `reader`, the linear layer that casts it first."""
    hidden, tokens, w = shape.model.hidden, shape.stream_tokens, shape.matmul_bytes
    full, cast = tokens * hidden * shape.stream_bytes, tokens * hidden * w
    kernel = f"{shape.model.norm}_forward"
    statistics = norm_saved_bytes(shape, tokens, hidden)
    norm = Operation(
        name, Kind.NORM, Phase.FORWARD, group, kernel, repeat,
        elements=tokens * hidden, bytes_moved=2 * full,
        saved_bytes=statistics + (0 if shape.casts else shape.normed_bytes),
        temporary_bytes=full if shape.casts else 0,
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


def residual(shape: Shape, repeat: int) -> Operation:
    """x + f(x): the new stream is saved by the next norm; f(x) dies."""
    elements, width = shape.stream_tokens * shape.model.hidden, shape.stream_bytes
    return Operation(
        "residual", Kind.ELEMENTWISE, Phase.FORWARD, "block", "add", repeat,
        elements=elements, bytes_moved=elements * (2 * width + shape.matmul_bytes),
        saved_bytes=elements * (width + shape.conventions.dropout_mask_bytes),
        frees_temporary_bytes=elements * shape.matmul_bytes,
    )  # fmt: skip


def joining(shape: Shape, phase: Phase) -> list[Operation]:
    """What a branch goes through before it joins the residual stream: a factor, dropout; mostly nothing."""
    if shape.conventions.fused:  # with the addition that follows
        return []
    elements = shape.tokens * shape.model.hidden
    branch, backward = elements * shape.matmul_bytes, phase is Phase.BACKWARD
    dropped = dropout(shape, phase)
    if shape.model.residual_scale == 1.0:
        return dropped
    if shape.model.norm_place != "pre":  # norms give fp32, and their gradient is the stream's own
        branch = elements * FP32
    freed = 0 if backward and not dropped and not (shape.casts and shape.model.norm_place == "pre") else branch
    scaled = elementwise(
        shape, "residual_scale", "multiply", elements, 2, backward=backward, temporary=branch, frees_temporary=freed
    )
    return [*dropped, scaled] if backward else [scaled, *dropped]


def linear_backward(
    shape: Shape, name: str, group: str, repeat: int, inputs: Size, outputs: Size, *, frees: Size, bias: bool,
    consumes: Size | None = None, rows: Size | None = None,
) -> list[Operation]:  # fmt: skip
    """dx = dy W and dW = dy^T x, and the bias gradient: a sum of dy over tokens.

    `frees`: saved bytes (the input x) that die when the node is done; `consumes`: bytes of dy that die with it.
    """
    w, tokens = shape.matmul_bytes, rows if rows is not None else shape.tokens
    dy = tokens * outputs * w if consumes is None else consumes
    flops = 2 * tokens * outputs * inputs
    moved = w * (tokens * inputs + inputs * outputs + tokens * outputs)
    weight_copy = inputs * outputs * w if shape.casts else 0
    weight_gradient = inputs * outputs * FP32
    operations = [
        *quantised(shape, name, group, repeat, Phase.BACKWARD, tokens, inputs, outputs),
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
    if bias and not shape.conventions.fused:
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


def norm_backward(shape: Shape, name: str, group: str, repeat: int, *, reader: str, residual: bool) -> list[Operation]:
    """dy to dx, then (inside a block) the sum with the gradient that came along the residual connection."""
    hidden, tokens, w = shape.model.hidden, shape.stream_tokens, shape.matmul_bytes
    full = tokens * hidden * shape.stream_bytes
    operations = []
    if shape.casts:
        operations.append(
            Operation(
                f"{reader}_cast", Kind.ELEMENTWISE, Phase.BACKWARD, group, "cast", repeat, elements=tokens * hidden,
                bytes_moved=full + tokens * hidden * w, temporary_bytes=full,
                frees_temporary_bytes=tokens * hidden * w,
            )
        )  # fmt: skip
    statistics = norm_saved_bytes(shape, tokens, hidden)
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
                elements=tokens * hidden, bytes_moved=(2 if shape.conventions.fused else 3) * full,
                frees_temporary_bytes=full,
            )
        )  # fmt: skip
    return operations


def cast_gradient(shape: Shape) -> Operation:
    elements = shape.tokens * shape.model.hidden
    return Operation(
        "residual_cast", Kind.ELEMENTWISE, Phase.BACKWARD, "block", "cast", shape.model.layers, elements=elements,
        bytes_moved=elements * (FP32 + shape.matmul_bytes), temporary_bytes=elements * shape.matmul_bytes,
    )  # fmt: skip
