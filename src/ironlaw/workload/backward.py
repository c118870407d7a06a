"""The operations of a decoder's backward pass: `forward.py` in reverse, freeing what is saved there.

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
    qk_norm_saved_bytes,
)
from ironlaw.workload.division import on_rank
from ironlaw.workload.forward import fused_loss, scaled
from ironlaw.workload.layers import cast_gradient, joining, linear_backward, norm_backward
from ironlaw.workload.operations import Operation
from ironlaw.workload.sizes import Size


def head_backward(shape: Shape) -> list[Operation]:
    return on_rank(shape, chunked_head_backward(shape) if shape.loss_chunk else full_head_backward(shape))


def full_head_backward(shape: Shape) -> list[Operation]:
    model, tokens, w = shape.model, shape.tokens, shape.matmul_bytes
    logits = tokens * model.vocab
    if shape.conventions.fused:
        products = linear_backward(shape, "head", "head", 1, model.hidden, model.vocab, frees=0, bias=False)
        return [fused_loss(shape, Phase.BACKWARD), *products]
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
    if model.logit_cap is not None:
        operations.append(
            Operation(
                "logit_cap", Kind.ELEMENTWISE, Phase.BACKWARD, "head", "tanh_backward", elements=logits,
                bytes_moved=7 * logits * w, temporary_bytes=logits * w, frees_temporary_bytes=logits * w,
                frees_saved_bytes=logits * w,
            )
        )  # fmt: skip
    operations += linear_backward(
        shape, "head", "head", 1, model.hidden, model.vocab, frees=tokens * model.hidden * w, bias=model.head_bias
    )
    return operations + final_norm_backward(shape)


def final_norm_backward(shape: Shape) -> list[Operation]:
    operations = norm_backward(shape, "final_norm", "head", 1, reader="head", residual=False)
    if shape.model.logit_scale != 1.0:
        operations.insert(len(operations) - 1, scaled(shape, "logit_scale", "head", Phase.BACKWARD))
    return operations


def chunked_head_backward(shape: Shape) -> list[Operation]:
    """Both gradients are there: they are scaled in place, and the weight's becomes the parameter's."""
    model, w = shape.model, shape.matmul_bytes
    hidden, table = shape.tokens * model.hidden, model.vocab * model.hidden
    kept = Operation(
        "loss", Kind.OTHER, Phase.BACKWARD, "head", "", repeat=0, frees_saved_bytes=hidden * w + table * FP32
    )
    scale = Operation(
        "loss", Kind.LOSS, Phase.BACKWARD, "head", "add_in_place", elements=hidden + table,
        bytes_moved=2 * (hidden * w + table * FP32), temporary_bytes=hidden * w, gradient_bytes=table * FP32,
    )  # fmt: skip
    return [kept, scale, *final_norm_backward(shape)]


def block_backward(shape: Shape) -> list[Operation]:
    """Exactly `block` in reverse: what was saved there is freed here."""
    model, layers = shape.model, shape.model.layers
    operations = [cast_gradient(shape)] if shape.casts else []
    operations += joining(shape, Phase.BACKWARD)
    operations += feed_forward_backward(shape, model.ffn_size, "ffn", consumes=branch_gradient(shape))
    first = "ffn_gate" if model.gated_ffn else "ffn_up"
    operations += norm_backward(shape, "ffn_norm", "block", layers, reader=first, residual=True)
    return on_rank(shape, operations + attention_half_backward(shape))


def branch_gradient(shape: Shape) -> int:
    """Bytes of a branch's own copy of the gradient of the residual stream.

    That gradient stays alive beside the branch, so dy of the branch frees nothing; in reduced precision, and after
    dropout or a factor, the branch works on its own copy.
    """
    own = shape.casts or shape.model.dropout or shape.model.residual_scale != 1.0
    return shape.tokens * shape.model.hidden * shape.matmul_bytes if own else 0


def feed_forward_backward(shape: Shape, width: int, name: str, consumes: int) -> list[Operation]:
    """`feed_forward` in reverse. `consumes`: bytes of the gradient of its output that die with their last use."""
    model, layers, w = shape.model, shape.model.layers, shape.matmul_bytes
    inner, normed = shape.tokens * width, shape.tokens * model.hidden * w
    if shape.conventions.fused:
        both = 2 * width if model.gated_ffn else width
        operations = linear_backward(
            shape, f"{name}_down", "block", layers, width, model.hidden, frees=0, bias=model.has_ffn_bias
        )
        operations.append(activated_backward(shape, inner))
        return operations + linear_backward(
            shape, f"{name}_up", "block", layers, model.hidden, both, frees=0, bias=model.has_ffn_bias
        )
    relu = model.activation == "relu"  # which keeps its result until its own turn
    operations = linear_backward(
        shape, f"{name}_down", "block", layers, width, model.hidden,
        frees=0 if relu and not model.gated_ffn else inner * w, bias=model.has_ffn_bias, consumes=consumes,
    )  # fmt: skip
    if model.gated_ffn:
        operations.append(
            elementwise(
                shape, "gate_product", "multiply_backward", inner, 6, backward=True,
                temporary=2 * inner * w, frees_saved=(1 if relu else 2) * inner * w, frees_temporary=inner * w,
            )
        )  # fmt: skip
        operations += linear_backward(
            shape, f"{name}_up", "block", layers, model.hidden, width,
            frees=normed if shape.casts else 0, bias=model.has_ffn_bias,
        )  # fmt: skip
    made = inner * w * (2 if model.activation == "relu2" else 1)  # one gradient for each factor
    operations.append(
        elementwise(
            shape, "activation", f"{model.activation}_backward", inner, 3, backward=True,
            temporary=made, frees_saved=inner * w, frees_temporary=made,
        )
    )  # fmt: skip
    first = f"{name}_gate" if model.gated_ffn else f"{name}_up"
    operations += linear_backward(
        shape, first, "block", layers, model.hidden, width, frees=normed, bias=model.has_ffn_bias
    )
    if model.gated_ffn:
        operations.append(
            elementwise(
                shape, "ffn_norm", "add_in_place", shape.tokens * model.hidden, 3, backward=True, frees_temporary=normed
            )
        )
    return operations


def activated_backward(shape: Shape, inner: Size) -> Operation:
    """`activated` in reverse: of a gate, two gradients from one and both factors."""
    tensors = 5 if shape.model.gated_ffn else 10 / 3
    return elementwise(shape, "activation", f"{shape.model.activation}_backward", inner, tensors, backward=True)


def attention_half_backward(shape: Shape) -> list[Operation]:
    """`attention_half` in reverse."""
    operations = [cast_gradient(shape)] if shape.casts else []
    operations += joining(shape, Phase.BACKWARD)
    operations += attention_branch_backward(shape, branch_gradient(shape))
    reader = "qkv" if shape.model.latent is None else latent.first_reader(shape.model)
    return operations + norm_backward(
        shape, "attention_norm", "block", shape.model.layers, reader=reader, residual=True
    )


def attention_branch_backward(shape: Shape, consumes: int) -> list[Operation]:
    """`attention_branch` in reverse; `consumes` as in `feed_forward_backward`."""
    model, layers = shape.model, shape.model.layers
    mixed = shape.tokens * model.mixed_size * shape.matmul_bytes
    operations = linear_backward(
        shape, "attention_out", "block", layers, model.mixed_size, model.hidden,
        frees=mixed if shape.pads_values else 0, bias=model.has_out_bias, consumes=consumes,
    )  # fmt: skip
    if model.latent is not None:
        operations += [*latent.unpadded_backward(shape), attention(shape, Phase.BACKWARD)]
        return operations + latent.projections_backward(shape)
    return [*operations, attention(shape, Phase.BACKWARD), *projections_backward(shape)]


def projections_backward(shape: Shape) -> list[Operation]:
    """`projections` in reverse."""
    model, tokens, w, layers = shape.model, shape.tokens, shape.matmul_bytes, shape.model.layers
    qkv, heads = model.query_size + 2 * model.key_value_size, model.query_size + model.key_value_size
    normed = tokens * model.hidden * w
    operations = []
    # Gradients of query, key and value are gathered into one buffer shaped like the qkv output.
    gathered = tokens * qkv * w
    if model.positions == "rope":
        operations.append(elementwise(shape, "rotary", "rotary", tokens * heads, 2, backward=True))
    if model.qk_norm:
        operations.append(
            replace(
                elementwise(
                    shape, "qk_norm", "rmsnorm_backward", tokens * heads, 3, backward=True,
                    frees_saved=qk_norm_saved_bytes(shape),
                ),
                kind=Kind.NORM,
                gradient_bytes=sum(model.qk_norm_sizes) * FP32,
            )
        )  # fmt: skip
    if not (shape.conventions.fused and model.positions == "rope"):  # whose kernel gives them in their place
        operations.append(
            elementwise(
                shape, "qkv", "concatenate", tokens * qkv, 2, backward=True,
                temporary=gathered, frees_saved=gathered if shape.keeps_qkv else 0, frees_temporary=gathered,
            )
        )  # fmt: skip
    return operations + linear_backward(
        shape, "qkv", "block", layers, model.hidden, qkv, frees=normed, bias=model.has_qkv_bias
    )


def embedding_backward(shape: Shape) -> list[Operation]:
    model, tokens = shape.model, shape.tokens
    full, table = tokens * model.hidden * FP32, model.vocab * model.hidden * FP32
    if shape.conventions.fused:
        stream = shape.stream_tokens * model.hidden
        added = elementwise(shape, "embedding", "embedding_backward", stream, 4, backward=True)
        return [replace(added, kind=Kind.EMBEDDING, group="embedding", repeat=1)]
    operations = []
    if model.embedding_norm:
        fp32 = replace(shape, precision="fp32")
        operations += norm_backward(fp32, "embedding_norm", "embedding", 1, reader="", residual=False)
    if model.embedding_scale != 1.0:
        operations.append(scaled(shape, "embedding_scale", "embedding", Phase.BACKWARD))
    if model.positions == "learned":
        positions = model.context * model.hidden * FP32
        operations.append(
            Operation(
                "positions", Kind.EMBEDDING, Phase.BACKWARD, "embedding", "sum_rows", elements=tokens * model.hidden,
                bytes_moved=full + positions, gradient_bytes=positions,
                frees_saved_bytes=tokens * INDEX if shape.documents else 0,
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
            frees_saved_bytes=0 if shape.composes_attention else shape.mask_bytes,
        )
    )  # fmt: skip
    if model.tied:
        operations.append(
            Operation(
                "embedding", Kind.EMBEDDING, Phase.BACKWARD, "embedding", "add_in_place",
                elements=model.vocab * model.hidden, bytes_moved=3 * table,
            )
        )  # fmt: skip
    return on_rank(shape, operations)
