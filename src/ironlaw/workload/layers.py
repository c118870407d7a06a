"""Single layers of a decoder with their backward passes: linear layers, norms, the residual stream.

Symbols as in `forward.py`.
"""

from __future__ import annotations

from ironlaw.ledger import Kind
from ironlaw.workload.blocks import FP32, Shape, cast, dropout, elementwise, norm_saved_bytes
from ironlaw.workload.conventions import Casts, whole_tiles
from ironlaw.workload.operations import Operation, call, fast_replace, product
from ironlaw.workload.sizes import Size


def linear(
    shape: Shape, name: str, inputs: Size, outputs: Size, *, keep: bool, bias: bool, frees: Size = 0,
    consumes: Size | None = None, rows: Size | None = None, summed: bool = False,
) -> list[Operation]:  # fmt: skip
    """y = x W^T + b for `rows` tokens, by default all. `keep`: a later operation saves y; otherwise y is temporary.

    `frees`: saved bytes (of x) freed by its backward pass; `consumes`: bytes of dy freed there, by default all.
    `summed`: tensor parallel ranks divide the inputs of W, not its outputs.
    In reduced precision autocast first casts x (from an fp32 producer) and W; W's copy lives until its backward.
    """
    w, tokens = shape.matmul_bytes, rows if rows is not None else shape.tokens
    out_bytes, dy = tokens * outputs * w, tokens * outputs * w if consumes is None else consumes
    sizes, sums_bias = (tokens, outputs, inputs), bias and not shape.conventions.fused
    gradients = product_gradients(shape, name, sizes, frees=frees, consumes=0 if sums_bias else dy, summed=summed)
    if sums_bias:
        gradients.append(
            call(name, "sum_rows", tokens * outputs, out_bytes, parameters=outputs * FP32, frees_temporary=dy)
        )
    casts, casts_backward = quantising(shape, name, tokens, inputs, outputs)
    result = product(
        name, sizes, w, kernel="matmul_bias" if bias else "matmul", saved=out_bytes if keep else 0,
        temporary=0 if keep else out_bytes, summed=summed, gradient=[*casts_backward, *gradients],
    )  # fmt: skip
    return [*casts, *weight_cast(shape, name, inputs * outputs), result]


def product_gradients(
    shape: Shape, name: str, of: tuple[Size, Size, Size], *, batch: Size = 1, weights: Size | None = None,
    rows: Size | None = None, frees: Size = 0, consumes: Size = 0, moved: Size | None = None, summed: bool = False,
) -> list[Operation]:  # fmt: skip
    """dx = dy W and dW = dy^T x of a product `of` (tokens, outputs, inputs), each with the FLOPs of the product itself.

    A batch of `batch` products has `weights` weight elements and `rows` rows in total. `frees`, `consumes` and `summed`
    are as in `linear`.
    """
    (tokens, outputs, inputs), w = of, shape.matmul_bytes
    count, rows = inputs * outputs if weights is None else weights, tokens if rows is None else rows
    copy, flops = count * w if shape.casts else 0, 2 * rows * inputs * outputs
    moved = w * (rows * inputs + count + rows * outputs) if moved is None else moved
    return [
        product(
            name, (tokens, inputs, outputs), w, batch=batch, flops=flops, moved=moved, temporary=rows * inputs * w,
            summed=summed,
        ),
        product(
            name, (outputs, inputs, tokens), w, kernel="matmul_weight_gradient", batch=batch, flops=flops, moved=moved,
            parameters=0 if shape.casts else count * FP32, temporary=copy, frees_saved=frees + copy,
            frees_temporary=consumes, summed=summed,
        ),
    ]  # fmt: skip


def weight_cast(shape: Shape, name: str, weights: Size) -> list[Operation]:
    """Autocast's copy of a weight and the cast of its gradient; empty if products have the weights' precision."""
    if not shape.casts:
        return []
    copy, full = weights * shape.matmul_bytes, weights * FP32
    back = call(f"{name}_cast", "cast", weights, copy + full, parameters=full, frees_temporary=copy)
    return [call(f"{name}_cast", "cast", weights, copy + full, saved=copy, gradient=[back])]


def quantising(
    shape: Shape, name: str, rows: Size, inputs: Size, outputs: Size, batch: Size = 1
) -> tuple[list[Operation], list[Operation]]:
    """The casts of the operands of an 8- or 4-bit product, forward and backward; none outside a block's layers."""
    casts, weights = shape.conventions.casts, inputs * outputs * batch
    wide = name in ("head", "router", "shared_gate") or not whole_tiles(shape.conventions.tile, inputs, outputs)
    if wide or casts == Casts():
        return [], []
    forward = casts.inputs * rows * inputs * batch + casts.weights * weights
    backward = casts.gradients * rows * outputs * batch + casts.inputs_again * rows * inputs * batch
    backward = backward + casts.weights_again * weights
    return [call(f"{name}_cast", "quantise", 0, forward)], [call(f"{name}_cast", "quantise", 0, backward)]


def norm(shape: Shape, name: str, *, reader: str, residual: bool = True, owns_input: bool = True) -> list[Operation]:
    """A norm of x, already saved as the residual stream, to y, saved by `reader`, the linear layer that casts it first.

    Its backward pass computes dx from dy and, with `residual`, adds the gradient of the residual connection.
    `owns_input`: its backward pass frees x, the residual stream at this point.
    """
    elements = shape.stream_elements
    full = elements * shape.stream_bytes
    gradients = [
        call(
            name, f"{shape.model.norm}_backward", elements, 3 * full, kind=Kind.NORM, scratch=full,
            frees_saved=full * owns_input, parameters=shape.model.norm_parameters * FP32, on_stream=True,
            gathered=True,
        )
    ]  # fmt: skip
    if residual:
        gradients.append(joined_gradient(shape))
    is_freed = shape.casts or (shape.head_is_frozen and reader == "head")  # a frozen matrix does not save its input
    operations = [
        call(
            name, f"{shape.model.norm}_forward", elements, 2 * full, kind=Kind.NORM,
            held=norm_saved_bytes(shape, shape.stream_tokens, shape.model.hidden),
            saved=0 if is_freed else shape.normed_bytes, temporary=full if shape.casts else 0, on_stream=True,
            gathered=True, gradient=gradients,
        )
    ]  # fmt: skip
    return operations + input_cast(shape, reader, frees=full)


def input_cast(shape: Shape, reader: str, frees: Size = 0) -> list[Operation]:
    """The cast of a linear layer's input from the stream's width; the layer saves the copy. `frees`: bytes freed."""
    if not shape.casts:
        return []
    elements = shape.stream_elements
    saved = 0 if shape.head_is_frozen and reader == "head" else elements * shape.matmul_bytes
    return [cast(shape, f"{reader}_cast", elements, saved=saved, frees_temporary=frees)]


def joined_gradient(shape: Shape) -> Operation:
    """The addition of the residual connection's gradient to a branch's input gradient."""
    elements = shape.stream_elements
    full = elements * shape.stream_bytes
    tensors = 2 if shape.conventions.fused else 3
    return call("residual", "add_in_place", elements, tensors * full, frees_temporary=full, on_stream=True)


def residual(shape: Shape) -> Operation:
    """x + f(x): the next norm saves the sum; f(x) is freed. The sum's gradient, cast, is also that of the branch."""
    elements, width, w = shape.stream_elements, shape.stream_bytes, shape.matmul_bytes
    gradient = []
    if shape.casts:
        every = shape.elements
        gradient = [call("residual_cast", "cast", every, every * (FP32 + w), temporary=every * w, on_stream=True)]
    return call(
        "residual", "add", elements, elements * (2 * width + w), frees_temporary=elements * w,
        saved=elements * (width + shape.conventions.dropout_mask_bytes), on_stream=True,
        gradient=gradient,
    )  # fmt: skip


def joining(shape: Shape) -> list[Operation]:
    """The factor and the dropout on a branch before it joins the residual stream; empty for most models."""
    if shape.conventions.fused:  # into the addition that follows
        return []
    dropped = dropout(shape)
    if shape.model.residual_scale == 1.0:
        return dropped
    elements, pre = shape.elements, shape.model.norm_place == "pre"
    branch = elements * (shape.matmul_bytes if pre else FP32)  # norms output fp32, and their gradient is the stream's
    freed = 0 if not dropped and not (shape.casts and pre) else branch
    back = elementwise(shape, "residual_scale", "multiply", elements, 2, temporary=branch, frees_temporary=freed)
    return [fast_replace(back, frees_temporary_bytes=branch, gradient=(back,)), *dropped]
