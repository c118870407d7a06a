"""The operations of a decoder's forward pass: embedding, one block (repeated `layers` times), output layer and loss.

Symbols as in `transformer.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ironlaw.ledger import Kind, Phase
from ironlaw.workload import latent
from ironlaw.workload.blocks import (
    FP32,
    INDEX,
    Shape,
    attention,
    elementwise,
    norm_saved_bytes,
    qk_norm_saved_bytes,
    rotary_saved_bytes,
)
from ironlaw.workload.division import on_rank
from ironlaw.workload.layers import joining, linear, norm, residual
from ironlaw.workload.operations import Operation
from ironlaw.workload.sizes import Size


def embedding(shape: Shape) -> list[Operation]:
    model, tokens = shape.model, shape.tokens
    full = tokens * model.hidden * FP32
    if shape.conventions.fused:
        stream = shape.stream_tokens * model.hidden
        looked_up = elementwise(shape, "embedding", "embedding_forward", stream, 2)
        return [replace(looked_up, kind=Kind.EMBEDDING, group="embedding", repeat=1)]
    operations = [
        Operation(
            "embedding", Kind.EMBEDDING, Phase.FORWARD, "embedding", "embedding_forward",
            elements=tokens * model.hidden, bytes_moved=2 * full + tokens * INDEX, saved_bytes=full,
        )
    ]  # fmt: skip
    if shape.mask_bytes:  # kept by every layer's attention; a composed one uses it up
        saved = 0 if shape.composes_attention else shape.mask_bytes
        operations.append(
            Operation(
                "mask", Kind.ATTENTION, Phase.FORWARD, "embedding", "add", elements=shape.mask_bytes // FP32,
                bytes_moved=3 * shape.mask_bytes, saved_bytes=saved, temporary_bytes=shape.mask_bytes - saved,
            )
        )  # fmt: skip
    if model.positions == "learned":
        operations.append(
            Operation(
                "positions", Kind.EMBEDDING, Phase.FORWARD, "embedding", "add", elements=tokens * model.hidden,
                bytes_moved=2 * full, temporary_bytes=full * (1 + shape.documents),
                frees_temporary_bytes=full * (1 + shape.documents),
                saved_bytes=tokens * INDEX if shape.documents else 0,  # which position each token has
            )
        )  # fmt: skip
    if model.embedding_scale != 1.0:
        operations.append(scaled(shape, "embedding_scale", "embedding", Phase.FORWARD))
    if model.embedding_norm:  # keeps what it is given; its result is the stream
        operations += norm(replace(shape, precision="fp32"), "embedding_norm", "embedding", 1, reader="")
    if not shape.keeps_stream:
        operations[0] = replace(operations[0], saved_bytes=0, temporary_bytes=full)
    return on_rank(shape, operations)


def scaled(shape: Shape, name: str, group: str, phase: Phase) -> Operation:
    """The residual stream times a number, which takes its place."""
    elements = shape.tokens * shape.model.hidden
    return Operation(
        name, Kind.ELEMENTWISE, phase, group, "multiply", elements=elements, bytes_moved=2 * elements * FP32,
        temporary_bytes=elements * FP32, frees_temporary_bytes=elements * FP32,
    )  # fmt: skip


def block(shape: Shape) -> list[Operation]:
    """One block with a dense feed-forward network. Other orders than GPT-2's: `arrangements.py`."""
    model, layers = shape.model, shape.model.layers
    operations = attention_half(shape)
    operations += norm(shape, "ffn_norm", "block", layers, reader="ffn_gate" if model.gated_ffn else "ffn_up")
    operations += feed_forward(shape, model.ffn_size, "ffn")
    operations += joining(shape, Phase.FORWARD)
    operations.append(residual(shape, layers))
    return on_rank(shape, operations)


def attention_half(shape: Shape) -> list[Operation]:
    """Norm, attention and its residual addition."""
    reader = "qkv" if shape.model.latent is None else latent.first_reader(shape.model)
    operations = norm(shape, "attention_norm", "block", shape.model.layers, reader=reader)
    operations += attention_branch(shape) + joining(shape, Phase.FORWARD)
    return [*operations, residual(shape, shape.model.layers)]


def attention_branch(shape: Shape, keep: bool = False) -> list[Operation]:
    """From the normed input to what the output layer gives; `keep`: a norm after it saves that."""
    model, tokens, w, layers = shape.model, shape.tokens, shape.matmul_bytes, shape.model.layers
    if model.latent is not None:
        operations = [*latent.projections(shape), attention(shape, Phase.FORWARD), *latent.unpadded(shape)]
    else:
        operations = [*projections(shape), attention(shape, Phase.FORWARD)]
    operations += linear(
        shape, "attention_out", "block", layers, model.mixed_size, model.hidden, keep=keep, bias=model.has_out_bias
    )
    if shape.composes_attention:  # the module's variables die when it returns
        qkv = tokens * (model.query_size + 2 * model.key_value_size) * w
        dying = shape.rotated_bytes + (0 if shape.keeps_qkv else qkv)
        if model.latent is not None:
            dying = latent.dying_after_attention(shape)
        operations[-1] = replace(operations[-1], frees_temporary_bytes=dying)
    return operations


def projections(shape: Shape) -> list[Operation]:
    """From the normed residual stream to queries, keys and values with their positions."""
    model, tokens, layers = shape.model, shape.tokens, shape.model.layers
    qkv, heads = model.query_size + 2 * model.key_value_size, model.query_size + model.key_value_size
    operations = linear(shape, "qkv", "block", layers, model.hidden, qkv, keep=shape.keeps_qkv, bias=model.has_qkv_bias)
    if model.qk_norm:
        operations.append(
            replace(
                elementwise(
                    shape, "qk_norm", "rmsnorm_forward", tokens * heads, 2,
                    saved=qk_norm_saved_bytes(shape),
                ),
                kind=Kind.NORM,
            )
        )  # fmt: skip
    if shape.conventions.fused and model.positions != "rope":  # batched products want them in another order
        operations.append(elementwise(shape, "qkv", "copy", tokens * qkv, 2))
    if model.positions == "rope":
        rotated = shape.rotated_bytes if shape.composes_attention else 0
        operations.append(
            elementwise(
                shape, "rotary", "rotary", tokens * heads, 2, saved=rotary_saved_bytes(shape), temporary=rotated
            )
        )  # fmt: skip
    return operations


def feed_forward(shape: Shape, width: int, name: str, keep: bool = False) -> list[Operation]:
    """A dense network `width` wide, from its normed input; the first linear layer finds it in its own precision.

    `keep`: a norm after it saves its result.
    """
    model, layers, w = shape.model, shape.model.layers, shape.matmul_bytes
    inner, normed, bias = shape.tokens * width, shape.tokens * model.hidden * w, model.has_ffn_bias
    if shape.conventions.fused:
        both = 2 * width if model.gated_ffn else width
        operations = linear(shape, f"{name}_up", "block", layers, model.hidden, both, keep=True, bias=bias)
        operations.append(activated(shape, inner))
        return operations + linear(shape, f"{name}_down", "block", layers, width, model.hidden, keep=keep, bias=bias)
    first = f"{name}_gate" if model.gated_ffn else f"{name}_up"
    # relu keeps its result, which the next product keeps too; the others keep what they are given.
    relu = model.activation == "relu"
    operations = linear(shape, first, "block", layers, model.hidden, width, keep=not relu, bias=bias)
    dying = inner * w if relu else 0
    operations.append(
        elementwise(
            shape, "activation", f"{model.activation}_forward", inner, 2, saved=inner * w, frees_temporary=dying
        )
    )
    if model.gated_ffn:
        if shape.casts:  # autocast does not remember the cast that the gate has already made of the same input
            operations.append(
                elementwise(shape, f"{name}_up_cast", "cast", shape.tokens * model.hidden, 3, saved=normed)
            )
        operations += linear(shape, f"{name}_up", "block", layers, model.hidden, width, keep=True, bias=bias)
        operations.append(elementwise(shape, "gate_product", "multiply", inner, 3, saved=inner * w))
    return operations + linear(shape, f"{name}_down", "block", layers, width, model.hidden, keep=keep, bias=bias)


def activated(shape: Shape, inner: Size) -> Operation:
    """The activation, its product with a gate's other half included, as one kernel; the next product keeps the result.

    Eager software keeps more: what lies between the two.
    """
    held = shape.conventions.storage.input_bytes + (shape.conventions.activation_saves - 1) * shape.matmul_bytes
    tensors = 3 if shape.model.gated_ffn else 2
    return elementwise(shape, "activation", f"{shape.model.activation}_forward", inner, tensors, saved=inner * held)


def head(shape: Shape) -> list[Operation]:
    operations = chunked_head(shape) if shape.loss_chunk else full_head(shape)
    if shape.composes_attention:  # the mask dies with the pass
        last = operations[-1]
        operations[-1] = replace(last, frees_temporary_bytes=last.frees_temporary_bytes + shape.mask_bytes)
    return on_rank(shape, operations)


def final_norm(shape: Shape) -> list[Operation]:
    """The last norm, as the output layer reads it."""
    operations = norm(shape, "final_norm", "head", 1, reader="head")
    if shape.model.logit_scale != 1.0:
        operations.insert(1, scaled(shape, "logit_scale", "head", Phase.FORWARD))
    if not shape.keeps_stream:  # the norm is the first to keep what it is given
        stream = shape.tokens * shape.model.hidden * FP32
        first = operations[0]
        operations[0] = replace(
            first, saved_bytes=first.saved_bytes + stream, frees_temporary_bytes=first.frees_temporary_bytes + stream
        )
    return operations


def full_head(shape: Shape) -> list[Operation]:
    model, tokens = shape.model, shape.tokens
    logits = tokens * model.vocab
    if shape.conventions.fused:
        return [
            *linear(shape, "head", "head", 1, model.hidden, model.vocab, keep=False, bias=False),
            fused_loss(shape, Phase.FORWARD),
        ]
    operations = final_norm(shape)
    operations += linear(shape, "head", "head", 1, model.hidden, model.vocab, keep=False, bias=model.head_bias)
    if model.logit_cap is not None:
        size = logits * shape.matmul_bytes
        operations.append(
            Operation(
                "logit_cap", Kind.ELEMENTWISE, Phase.FORWARD, "head", "tanh", elements=logits, bytes_moved=6 * size,
                saved_bytes=size, temporary_bytes=size, frees_temporary_bytes=size,
            )
        )  # fmt: skip
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


def fused_loss(shape: Shape, phase: Phase) -> Operation:
    """Logits to fp32 and their log-sum-exp; backward, their gradient, as wide as the products."""
    logits = shape.tokens * shape.model.vocab
    return Operation(
        "loss", Kind.LOSS, phase, "head", f"loss_{phase}", elements=logits,
        bytes_moved=logits * (shape.matmul_bytes + 2 * FP32),
    )  # fmt: skip


def chunked_head(shape: Shape) -> list[Operation]:
    """`model/loss.py`: the logits of some tokens at a time, turned at once into the gradients of x and the weight.

    Those two are what is kept: the result of the last norm dies with the pass.
    """
    model, w = shape.model, shape.matmul_bytes
    hidden, table = shape.tokens * model.hidden, model.vocab * model.hidden
    whole, rest = divmod(shape.tokens, min(shape.loss_chunk, shape.tokens))
    statistics = norm_saved_bytes(shape, shape.tokens, model.hidden)
    operations = final_norm(replace(shape, precision="fp32"))
    gradients = hidden * w + table * FP32
    operations[0] = replace(operations[0], saved_bytes=statistics + gradients, temporary_bytes=hidden * FP32)
    if shape.casts:
        operations.append(
            Operation(
                "head_cast", Kind.ELEMENTWISE, Phase.FORWARD, "head", "cast", elements=table,
                bytes_moved=table * (FP32 + w), temporary_bytes=table * w,
            )
        )  # fmt: skip
    operations += _chunk(shape, min(shape.loss_chunk, shape.tokens), whole)
    if rest:
        operations += _chunk(shape, rest, 1)
    turned = table * FP32 if shape.onednn and not shape.casts and model.vocab > model.hidden else 0
    dying = hidden * FP32 + (table * w if shape.casts else 0)
    operations.append(
        Operation(
            "loss", Kind.LOSS, Phase.FORWARD, "head", "add", elements=max(1, turned // FP32), bytes_moved=2 * turned,
            temporary_bytes=turned, frees_temporary_bytes=turned + dying,
        )
    )  # fmt: skip
    return operations


def _chunk(shape: Shape, rows: int, repeat: int) -> list[Operation]:
    """Logits, loss, their gradient in place, and its two products."""
    model, w = shape.model, shape.matmul_bytes
    onednn, logits = shape.onednn and not shape.casts, rows * model.vocab

    def product(m: int, n: int, k: int, kernel: str, takes: int, frees: int) -> Operation:
        return Operation(
            "head", Kind.MATMUL, Phase.FORWARD, "head", kernel, repeat, matmul=(m, n, k), flops=2 * m * n * k,
            bytes_moved=w * (m * k + k * n + m * n), temporary_bytes=takes, frees_temporary_bytes=frees,
        )  # fmt: skip

    def loss(kernel: str, tensors: int, takes: int, frees: int) -> Operation:
        return Operation(
            "loss", Kind.LOSS, Phase.FORWARD, "head", kernel, repeat, elements=logits,
            bytes_moved=tensors * logits * FP32, temporary_bytes=takes, frees_temporary_bytes=frees,
        )  # fmt: skip

    reduced = logits * w if shape.casts else 0
    part = rows * model.hidden * FP32 if onednn else 0
    # The product before it is added; a CPU adds reduced precision to fp32 by way of a copy in fp32.
    before = w + (0 if shape.fused_rmsnorm else FP32) if shape.casts else FP32 if onednn else 0
    table = model.vocab * model.hidden * before
    return [
        product(rows, model.vocab, model.hidden, "matmul", logits * w, 0),
        loss("loss_forward", 2, logits * FP32, logits * w),
        loss("loss_backward", 3, reduced, 0),
        product(rows, model.hidden, model.vocab, "matmul", part, part),
        product(model.vocab, model.hidden, rows, "matmul_weight_gradient", table, table + logits * FP32 + reduced),
    ]
