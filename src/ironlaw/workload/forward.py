"""The operations of a decoder, each with its backward pass: embedding, one block, output layer and loss.

The list mirrors `model/transformer.py` line by line, as PyTorch executes it without fusion. FLOPs equal those of
`torch.utils.flop_counter` on that module exactly, except that the counter ignores the causal mask, while masked scores
count nothing here, so that causal attention counts half. Saved bytes equal those held by autograd.

Symbols: T = micro-batch x sequence tokens, H hidden, Q and KV widths of all query and key/value heads, F FFN width,
V vocabulary, `w` bytes of a matmul input or output, 4 bytes everywhere else.
"""

from __future__ import annotations

from dataclasses import replace

from ironlaw.ledger import Kind
from ironlaw.workload import latent
from ironlaw.workload.blocks import (
    FP32,
    INDEX,
    Shape,
    activation,
    attention,
    cast,
    elementwise,
    gate_product,
    gradient_sum,
    noise,
    norm_saved_bytes,
    qk_norm_saved_bytes,
    rotary_saved_bytes,
)
from ironlaw.workload.layers import joining, linear, norm, residual
from ironlaw.workload.operations import (
    Operation,
    call,
    differentiate,
    gradient_first,
    gradient_last,
    product,
    with_memory,
)
from ironlaw.workload.sizes import Size


def embedding(shape: Shape) -> list[Operation]:
    model, elements, kind = shape.model, shape.elements, Kind.EMBEDDING
    full, table = elements * FP32, model.vocab * model.hidden * FP32
    if shape.conventions.fused:
        stream = shape.stream_elements
        added = elementwise(shape, "embedding", "embedding_backward", stream, 4, kind=kind)
        return [elementwise(shape, "embedding", "embedding_forward", stream, 2, kind=kind, gradient=[added])]
    # A tied table already has the head's gradient: the embedding's is a second copy until both are added.
    second_copy = table if model.tied else 0
    gradient = [
        call(
            "embedding", "embedding_backward", elements, 2 * full + table, kind=kind, parameters=table - second_copy,
            temporary=second_copy, frees_temporary=full + second_copy,
            frees_saved=0 if shape.composes_attention else shape.mask_bytes, on_stream=True,
        )
    ]  # fmt: skip
    if model.tied:
        gradient.append(call("embedding", "add_in_place", table // FP32, 3 * table, kind=kind))
    kept = full if shape.keeps_stream else 0
    operations = [
        call(
            "embedding", "embedding_forward", elements, 2 * full + shape.tokens * INDEX, kind=kind, saved=kept,
            temporary=full - kept, on_stream=True, gradient=gradient,
        )
    ]  # fmt: skip
    if mask := shape.mask_bytes:  # saved by every layer's fused attention; composed attention does not save it
        saved = 0 if shape.composes_attention else mask
        operations.append(
            call("mask", "add", mask // FP32, 3 * mask, kind=Kind.ATTENTION, saved=saved, temporary=mask - saved)
        )
    if model.positions == "learned":
        positions, scratch = model.context * model.hidden * FP32, full * (1 + shape.documents)
        numbers = shape.tokens * INDEX if shape.documents else 0  # the position of each token
        back = call(
            "positions", "sum_rows", elements, full + positions, kind=kind, parameters=positions, on_stream=True
        )  # fmt: skip
        operations.append(
            call(
                "positions", "add", elements, 2 * full, kind=kind, scratch=scratch, held=numbers, on_stream=True,
                gradient=[back],
            )
        )  # fmt: skip
    if model.embedding_scale != 1.0:
        operations.append(scaled(shape, "embedding_scale"))
    if model.embedding_norm:  # saves its input; its output is the residual stream
        operations += norm(replace(shape, precision="fp32"), "embedding_norm", reader="", residual=False)
    return operations


def scaled(shape: Shape, name: str) -> Operation:
    """The residual stream times a constant, replacing the stream; the same for its gradient."""
    full = shape.elements * FP32
    back = call(name, "multiply", full // FP32, 2 * full, scratch=full)
    return replace(back, gradient=(back,))


def block(shape: Shape) -> list[Operation]:
    """One block with a dense feed-forward network in GPT-2's order; `kinds.py` has the other orders."""
    network = after_norm(shape, "ffn_norm", network_reader(shape), feed_forward(shape, shape.model.ffn_size, "ffn"))
    return [*attention_half(shape), *network, *joining(shape), residual(shape)]


def network_reader(shape: Shape) -> str:
    """Return the name of the linear layer of a dense network that first reads its norm's output."""
    return "ffn_gate" if shape.model.gated_ffn else "ffn_up"


def attention_half(shape: Shape) -> list[Operation]:
    """The first half of a block: norm, attention and residual addition."""
    reader = "qkv" if shape.model.latent is None else latent.first_reader(shape.model)
    attention = after_norm(shape, "attention_norm", reader, attention_branch(shape))
    return [*attention, *joining(shape), residual(shape)]


def after_norm(shape: Shape, name: str, reader: str, branch: list[Operation]) -> list[Operation]:
    """A norm and its branch. Autocast casts a copy of the norm's output, so that the fp32 original, the input of the
    branch's module, lives until the module returns."""
    normed = norm(shape, name, reader=reader)
    freed_later = normed[-1].frees_temporary_bytes if shape.casts else 0
    normed[-1] = with_memory(normed[-1], frees_temporary=-freed_later)
    branch[-1] = with_memory(branch[-1], frees_temporary=freed_later)
    return [*normed, *branch]


def branch_gradient(shape: Shape) -> Size:
    """Return the bytes of a branch's own copy of the residual stream's gradient.

    That gradient stays alive during the branch's backward pass, so that dy of the branch frees nothing; in reduced
    precision, and after dropout or a factor, the branch has its own copy.
    """
    is_copied = shape.casts or shape.model.dropout or shape.model.residual_scale != 1.0
    return shape.elements * shape.matmul_bytes if is_copied else 0


def attention_branch(shape: Shape, keep: bool = False, consumes: Size | None = None) -> list[Operation]:
    """Attention from the normed input to the output layer's result; `keep`: a following norm saves the result.

    `consumes`: bytes of the output's gradient freed after its last use, by default `branch_gradient`.
    """
    model, tokens, w = shape.model, shape.tokens, shape.matmul_bytes
    parts = projections(shape) if model.latent is None else latent.projections(shape)
    parts += noise(shape, "attention", shape.micro_batch * model.heads * shape.sequence**2, Kind.ATTENTION)
    operations = [*parts, attention(shape), *latent.unpadded(shape)]
    operations += linear(
        shape, "attention_out", model.mixed_size, model.hidden, keep=keep, bias=model.has_out_bias,
        frees=tokens * model.mixed_size * w if shape.pads_values else 0,
        consumes=branch_gradient(shape) if consumes is None else consumes, summed=True,
    )  # fmt: skip
    if shape.composes_attention:  # the module's variables are freed when it returns
        qkv = tokens * (model.query_size + 2 * model.key_value_size) * w
        freed = shape.rotated_bytes + (0 if shape.keeps_qkv else qkv)
        if model.latent is not None:
            freed = latent.freed_after_attention(shape)
        operations[-1] = replace(operations[-1], frees_temporary_bytes=freed)
    return operations


def projections(shape: Shape) -> list[Operation]:
    """The operations from the normed residual stream to queries, keys and values with positions."""
    model, tokens, w, fused = shape.model, shape.tokens, shape.matmul_bytes, shape.conventions.fused
    qkv, heads = model.query_size + 2 * model.key_value_size, model.query_size + model.key_value_size
    size = tokens * qkv * w
    operations = linear(
        shape, "qkv", model.hidden, qkv, keep=shape.keeps_qkv or model.qkv_clip is not None, bias=model.has_qkv_bias,
        frees=shape.elements * w,
    )  # fmt: skip
    if model.qkv_clip is not None:  # saves its input
        back = elementwise(shape, "qkv_clip", "clamp_backward", tokens * qkv, 3, scratch=size, frees_saved=size)
        kept = {"saved" if shape.keeps_qkv else "temporary": size}
        operations.append(elementwise(shape, "qkv_clip", "clamp", tokens * qkv, 2, gradient=[back], **kept))
    if not (fused and model.positions == "rope"):  # a fused rotary kernel writes the gradients in place
        # Gradients of query, key and value are gathered into one buffer shaped like the qkv output.
        operations = gradient_first(
            operations,
            elementwise(
                shape, "qkv", "concatenate", tokens * qkv, 2, scratch=size, frees_saved=size if shape.keeps_qkv else 0
            ),
        )
    if model.qk_norm:
        back = elementwise(
            shape, "qk_norm", "rmsnorm_backward", tokens * heads, 3, kind=Kind.NORM,
            parameters=sum(model.qk_norm_sizes) * FP32,
        )  # fmt: skip
        operations.append(
            elementwise(
                shape, "qk_norm", "rmsnorm_forward", tokens * heads, 2, kind=Kind.NORM, held=qk_norm_saved_bytes(shape),
                gradient=[back],
            )
        )  # fmt: skip
    if fused and model.positions != "rope":  # batched products need another memory order
        operations.append(elementwise(shape, "qkv", "copy", tokens * qkv, 2))
    if model.positions == "rope":
        operations.append(
            elementwise(
                shape, "rotary", "rotary", tokens * heads, 2, saved=rotary_saved_bytes(shape),
                temporary=shape.rotated_bytes if shape.composes_attention else 0,
                gradient=[elementwise(shape, "rotary", "rotary", tokens * heads, 2)],
            )
        )  # fmt: skip
    return operations


def feed_forward(
    shape: Shape, width: Size, name: str, *, keep: bool = False, consumes: Size | None = None, owns_input: bool = True,
    summed: bool = True,
) -> list[Operation]:  # fmt: skip
    """A dense feed-forward network of `width`, from its normed input in the precision of the products.

    `keep`: a following norm saves its result; `consumes`: as in `attention_branch`; `owns_input`: its backward pass
    frees its input. `summed`: tensor parallel ranks sum its results here, not together with other results.
    """
    model, w, bias = shape.model, shape.matmul_bytes, shape.model.has_ffn_bias
    inner, normed = shape.tokens * width, shape.elements * w
    if shape.conventions.fused:
        gate_and_up = 2 * width if model.gated_ffn else width
        operations = linear(shape, f"{name}_up", model.hidden, gate_and_up, keep=True, bias=bias)
        operations.append(activated(shape, inner))
        return operations + linear(shape, f"{name}_down", width, model.hidden, keep=keep, bias=bias)
    # ReLU saves its output, which the next product saves too; other activations save their input.
    relu = model.activation == "relu"
    gradient_bytes = inner * w * (2 if model.activation == "relu2" else 1)  # one gradient for each factor
    operations = linear(
        shape, f"{name}_gate" if model.gated_ffn else f"{name}_up", model.hidden, width, keep=not relu, bias=bias,
        frees=normed if owns_input else 0,
    )  # fmt: skip
    operations.append(activation(shape, inner, made=gradient_bytes, frees=inner * w if relu else 0))
    if model.gated_ffn:
        operations = gradient_last(operations, gradient_sum(shape, "ffn_norm", shape.elements, normed))
        if shape.casts:  # autocast does not cache the gate's cast of the same input
            operations.append(elementwise(shape, f"{name}_up_cast", "cast", shape.elements, 3, saved=normed))
        operations += linear(shape, f"{name}_up", model.hidden, width, keep=True, bias=bias,
                             frees=normed if shape.casts else 0)  # fmt: skip
        operations.append(gate_product(shape, inner, kept=1 if relu else 2))
    return operations + linear(
        shape, f"{name}_down", width, model.hidden, keep=keep, bias=bias,
        frees=0 if relu and not model.gated_ffn else inner * w,
        consumes=branch_gradient(shape) if consumes is None else consumes, summed=summed,
    )  # fmt: skip


def activated(shape: Shape, inner: Size) -> Operation:
    """The activation and, in a gated network, the product with the other half, as one kernel.

    The next product saves its result; eager software also saves the activation's. In a gated network the backward pass
    computes two gradients from one gradient and both factors."""
    saved = shape.conventions.storage.input_bytes + (shape.conventions.activation_saves - 1) * shape.matmul_bytes
    forward, backward = (3, 5) if shape.model.gated_ffn else (2, 10 / 3)
    kernel = shape.model.activation
    return elementwise(
        shape, "activation", f"{kernel}_forward", inner, forward, saved=inner * saved,
        gradient=[elementwise(shape, "activation", f"{kernel}_backward", inner, backward)],
    )  # fmt: skip


def head(shape: Shape) -> list[Operation]:
    operations = chunked_head(shape) if shape.loss_chunk else full_head(shape)
    if shape.composes_attention:  # the mask is freed at the end of the forward pass
        operations[-1] = with_memory(operations[-1], frees_temporary=shape.mask_bytes)
    return operations


def final_norm(shape: Shape) -> list[Operation]:
    """The last norm, with the cast and scale before the output layer."""
    operations = norm(shape, "final_norm", reader="head", residual=False)
    if shape.model.logit_scale != 1.0:
        operations.insert(1, scaled(shape, "logit_scale"))
    if not shape.keeps_stream:  # no operation before this norm saves the stream
        stream = shape.elements * FP32 // shape.stream_parts
        operations[0] = with_memory(operations[0], saved=stream, frees_temporary=stream)
    return operations


def full_head(shape: Shape) -> list[Operation]:
    model, tokens, w, fused = shape.model, shape.tokens, shape.matmul_bytes, shape.conventions.fused
    logits = tokens * model.vocab
    operations = [] if fused else final_norm(shape)
    operations += linear(
        shape, "head", model.hidden, model.vocab, keep=False, bias=model.head_bias and not fused,
        frees=0 if fused or shape.head_is_frozen else shape.elements * w,
    )  # fmt: skip
    if fused:  # the logits' cast to fp32 and log-sum-exp; backward, their gradient in the products' precision
        back, loss_forward = (
            call("loss", f"loss_{phase}", logits, logits * (w + 2 * FP32), kind=Kind.LOSS)
            for phase in ("backward", "forward")
        )
        return [*operations, replace(loss_forward, gradient=(back,))]
    full, size = logits * FP32, logits * w
    if model.logit_cap is not None:
        back = call("logit_cap", "tanh_backward", logits, 7 * size, scratch=size)
        operations.append(call("logit_cap", "tanh", logits, 6 * size, held=size, scratch=size, gradient=[back]))
    if shape.casts:
        operations.append(cast(shape, "loss", logits, wide=True, kind=Kind.LOSS, temporary=full, frees_temporary=size))
    # Two gradients of the logits' size beside the saved log-probabilities: often the peak of the step.
    back = call("loss", "loss_backward", logits, 4 * full, kind=Kind.LOSS, temporary=2 * full,
                frees_temporary=full)  # fmt: skip
    loss = call("loss", "loss_forward", logits, 2 * full, kind=Kind.LOSS, held=full, frees_temporary=full,
                gradient=[back])  # fmt: skip
    return [*operations, loss]


def chunked_head(shape: Shape) -> list[Operation]:
    """The chunked loss of `model/loss.py`: logits of some tokens at a time yield at once the gradients of x and weight.

    Only these two gradients are saved; the last norm's output is freed with the forward pass. The backward pass scales
    them in place and makes the weight's the parameter's gradient.
    """
    model, w = shape.model, shape.matmul_bytes
    hidden, table = shape.elements, model.vocab * model.hidden
    whole, rest = divmod(shape.tokens, min(shape.loss_chunk, shape.tokens))
    statistics = norm_saved_bytes(shape, shape.tokens, model.hidden)
    operations = [replace(op, gradient=()) for op in final_norm(replace(shape, precision="fp32"))]
    trained = 0 if shape.head_is_frozen else table
    gradients = hidden * w + trained * FP32
    stream = 0 if shape.keeps_stream else hidden * FP32 // shape.stream_parts
    operations[0] = replace(
        operations[0], saved_bytes=statistics + gradients + stream, temporary_bytes=hidden * FP32,
        frees_temporary_bytes=stream, gradient=tuple(differentiate(final_norm(shape))),
    )  # fmt: skip
    if shape.casts_head:
        operations.append(call("head_cast", "cast", table, table * (FP32 + w), temporary=table * w))
    operations += _chunk(shape, min(shape.loss_chunk, shape.tokens), whole)
    if rest:
        operations += _chunk(shape, rest, 1)
    transposed = trained * FP32 if shape.onednn and not shape.casts and model.vocab > model.hidden else 0
    freed = hidden * FP32 + (table * w if shape.casts_head else 0)
    gradient = [
        replace(call("loss", "", 0, 0, kind=Kind.OTHER, frees_saved=gradients), repeat=0),
        call("loss", "add_in_place", hidden + trained, 2 * gradients, kind=Kind.LOSS, temporary=hidden * w,
             parameters=trained * FP32),
    ]  # fmt: skip
    loss = call("loss", "add", max(1, transposed // FP32), 2 * transposed, kind=Kind.LOSS, temporary=transposed,
                frees_temporary=transposed + freed, gradient=gradient)  # fmt: skip
    return [*operations, loss]


def _chunk(shape: Shape, rows: int, repeat: int) -> list[Operation]:
    """One chunk: logits, loss, the logits' gradient in place, and its two products."""
    vocab, hidden, w = shape.model.vocab, shape.model.hidden, shape.matmul_bytes
    onednn, logits = shape.onednn and not shape.casts, rows * vocab
    full = logits * FP32
    reduced = logits * w if shape.casts else 0
    wide = full if shape.casts and not shape.fused_rmsnorm else 0  # a CPU's softmax first casts logits to fp32
    part = rows * hidden * FP32 if onednn else 0
    # Bytes per element of the product before accumulation; a CPU adds reduced precision to fp32 through an fp32 copy.
    before = w + (0 if shape.fused_rmsnorm else FP32) if shape.casts else FP32 if onednn else 0
    table = vocab * hidden * before
    calls = [
        product("head", (rows, vocab, hidden), w, temporary=logits * w),
        call("loss", "loss_forward", logits, 2 * full, kind=Kind.LOSS, temporary=full + wide,
             frees_temporary=logits * w + wide),
        call("loss", "loss_backward", logits, 3 * full, kind=Kind.LOSS, temporary=reduced),
        product("head", (rows, hidden, vocab), w, scratch=part),
        product("head", (vocab, hidden, rows), w, kernel="matmul_weight_gradient", temporary=table,
                frees_temporary=table + full + reduced),
    ]  # fmt: skip
    return [replace(op, repeat=repeat) for op in calls]
