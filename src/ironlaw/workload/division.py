"""The operations of one rank where ranks divide a micro-batch.

`local_shape` gives a rank's shape: its part of heads, widths, vocabulary and tokens. `on_rank` applies the other
changes, by the flags of each operation (`Operation.on_stream`, `gathered`, `summed`).
As in the trainer (`train/parallel/`), tensor parallelism (arXiv 1909.08053) sums partial results in a copy; sequence
parallelism (arXiv 2205.05198) stores a part of the residual stream and gathers the input of a layer; context
parallelism gathers keys and values and saves them; query, key and value from separate layers are freed one by one.

On CPUs gloo copies the buffers of all-gather and reduce-scatter: bytes allocated while a collective runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.workload.blocks import FP32, Division, Shape, attention_score_pairs, norm_saved_bytes
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation, fast_replace, with_memory
from ironlaw.workload.sizes import Size, above_one, is_nonzero, larger, whole


def local_model(model: ModelConfig, layout: Layout) -> ModelConfig:
    """Return the model with one rank's sizes: its part of the heads, widths, vocabulary and experts."""
    tp, update = layout.tp, dict[str, Any]()
    if above_one(tp):
        update = {
            "heads": model.heads // tp, "kv_heads": larger(1, model.key_value_heads // tp),
            "head_size": model.size_of_head, "ffn": model.ffn_size // tp, "vocab": -(-model.vocab // tp),
        }  # fmt: skip
        if model.latent is not None:  # every rank computes whole narrow vectors
            update |= {"kv_heads": None, "head_size": None}
    if model.moe is not None:
        moe = dict[str, Any]()
        if above_one(layout.ep):  # its share of the experts, which serve the tokens of ep ranks
            moe["experts"] = model.moe.experts // layout.ep
        if above_one(tp):
            widths = {"expert_ffn": model.moe.expert_ffn, "shared_ffn": model.moe.shared_ffn}
            moe |= {name: width // tp for name, width in widths.items() if width is not None}
        if moe:
            update["moe"] = model.moe.model_copy(update=moe)
    if model.tied and above_one(layout.pp):  # the last stage has a copy
        update["tied"] = False
    return model.model_copy(update=update) if update else model


def local_shape(shape: Shape, layout: Layout) -> Shape:
    """Return one rank's shape from that of the whole model; the micro-batch is the layout's."""
    local_tokens = shape.sequence // layout.cp
    split = (above_one(layout.tp) or sharded(layout)) and not shape.adapters
    division = Division(layout.tp, layout.sp, layout.cp, split_qkv=split)
    return replace(
        shape,
        model=local_model(shape.model, layout),
        sequence=local_tokens,
        micro_batch=layout.micro_batch,
        division=division,
    )


def sharded(layout: Layout) -> bool:
    """Whether FSDP2 manages the weights; otherwise DDP does if there are replicas."""
    return above_one(1 + is_sharded(layout.zero, layout.dp * layout.cp, layout.tp * layout.pp * layout.ep))


def is_sharded(zero: Size, replicas: Size, others: Size) -> Size:
    """Whether FSDP2 manages the weights (0 or 1), by ZeRO stage, replicas and other ranks that divide weights."""
    return (zero > 0) | ((replicas > 1) & (others > 1))


def on_rank(shape: Shape, operations: list[Operation]) -> list[Operation]:
    """Return the operations with one rank's memory and work under `shape.division`."""
    if not (shape.division.divides_attention or shape.division.split_qkv):
        return operations
    rank = _Rank(shape)
    return [rank.work(rank.operation(op)) for op in operations]


class _Rank:
    def __init__(self, shape: Shape) -> None:
        self.shape, division = shape, shape.division
        model, w = shape.model, shape.matmul_bytes
        self.tp, self.cp, self.split = above_one(division.tp), division.cp, division.split_qkv
        self.divides_sequence, self.sp = above_one(division.cp), self.tp and division.sp
        self.parts = division.tp if self.sp else 1  # of the residual stream
        self.full, self.cast = shape.elements * FP32, shape.elements * w
        self.remote_bytes = self.full - self.full // self.parts  # bytes of the stream that other ranks hold
        self.logits = shape.tokens * model.vocab * FP32
        self.query = shape.tokens * model.query_size * w
        self.key_value = 2 * shape.tokens * model.key_value_size * w
        self.seen_input_cast = False
        # The projected query and key are saved by attention or by their norm, or freed once rotated copies exist.
        self.keeps_query = shape.keeps_qkv and (
            not shape.casts if model.qk_norm else model.positions != "rope"
        )  # fmt: skip

    def operation(self, op: Operation) -> Operation:
        forward = op.phase is Phase.FORWARD
        if op.kernel.startswith("embedding_") and op.kind is Kind.EMBEDDING:
            return self.embedding(op)
        if op.gathered:
            return self.read_by_layers(op, forward)
        if op.on_stream:
            made = self.stream(op)  # except that a cast gradient is gathered, in reduced precision
            return made if forward or op.kernel != "cast" else fast_replace(made, temporary_bytes=op.temporary_bytes)
        if op.kind is Kind.LOSS and self.tp and not self.shape.loss_chunk:
            # `loss_parallel` copies the shifted logits and has one more gradient.
            return with_memory(op, scratch=self.logits) if op.kernel in ("loss_forward", "loss_backward") else op
        if op.summed:
            return self.summed(op) if forward else self.gathered_gradient(op)
        if self.shape.model.latent is not None:
            return self.latent_attention(op, forward) if self.divides_sequence else op
        if self.split or self.divides_sequence:
            return self.attention(op, forward)
        return op

    def work(self, op: Operation) -> Operation:
        if self.sp and op.on_stream:
            return fast_replace(op, elements=op.elements // self.parts, bytes_moved=op.bytes_moved // self.parts)
        if self.divides_sequence and op.attention is not None:
            # All ranks have equally many unmasked pairs, of their queries and the keys of the whole sequence.
            batch, here, heads, groups, size = op.attention
            window = self.shape.model.sliding_window
            pairs = attention_score_pairs(here * self.cp, window) // self.cp
            ratio = pairs / attention_score_pairs(here, window)
            return fast_replace(
                op, attention=(batch, here * self.cp, heads, groups, size), elements=batch * heads * pairs // 2,
                flops=None if op.flops is None else whole(op.flops * ratio),
            )  # fmt: skip
        return op

    # -- the residual stream ---------------------------------------------------------------------------------------

    def stream(self, op: Operation) -> Operation:
        if not self.sp:
            return op
        return fast_replace(
            op, saved_bytes=op.saved_bytes // self.parts, temporary_bytes=op.temporary_bytes // self.parts,
            frees_saved_bytes=op.frees_saved_bytes // self.parts,
            frees_temporary_bytes=op.frees_temporary_bytes // self.parts,
        )  # fmt: skip

    def embedding(self, op: Operation) -> Operation:
        """In the backward pass DTensor allocates the gradient of the whole table; each rank's part is a view of it."""
        if not self.tp:
            return op
        if op.phase is Phase.FORWARD:
            kept = {"saved" if is_nonzero(op.saved_bytes) else "temporary": -self.remote_bytes}
            return with_memory(op, scratch=2 * self.full, **kept)
        model = self.shape.model
        others = (self.shape.division.tp - 1) * model.vocab * model.hidden * FP32
        if model.tied:  # added to the output layer's gradient and freed
            return with_memory(op, frees_temporary=-self.remote_bytes, scratch=others)
        op = fast_replace(op, gradient_bytes=op.gradient_bytes + others)
        return with_memory(op, frees_temporary=-self.remote_bytes)

    def read_by_layers(self, op: Operation, forward: bool) -> Operation:
        """An output that sequence parallel ranks gather: a copy by gloo, and one in token order. In the backward pass
        its gradient is summed over the ranks."""
        if not self.sp:
            return op if forward or not self.tp else with_memory(op, scratch=self.full)
        if not forward:
            left = {name: getattr(op, name) // self.parts for name in ("temporary_bytes", "frees_saved_bytes")}
            return with_memory(fast_replace(op, **left), scratch=2 * self.full)
        of_norm = norm_saved_bytes(self.shape, self.shape.tokens, self.shape.model.hidden) * (op.kind is Kind.NORM)
        return with_memory(op, saved=of_norm // self.parts - of_norm, scratch=self.full + self.full // self.parts)

    def summed(self, op: Operation) -> Operation:
        """A partial result, summed over the ranks in a copy."""
        if not self.tp:
            return op
        if not self.sp:
            return with_memory(op, scratch=self.cast)
        others = self.cast - self.cast // self.parts
        if is_nonzero(op.saved_bytes):  # saved by the norm after it
            return with_memory(op, saved=-others, scratch=2 * self.cast)
        return with_memory(op, frees_temporary=others, scratch=2 * self.cast)

    def gathered_gradient(self, op: Operation) -> Operation:
        """The gradient of a scattered result, gathered for the layer's two products and freed after the second."""
        if not self.sp:
            return op
        if op.kernel == "matmul":
            # A cast has already allocated the copy.
            return with_memory(op, temporary=0 if self.shape.casts else self.full, scratch=self.cast)
        if op.kernel == "matmul_weight_gradient" and not self.shape.casts:
            model = self.shape.model
            own = model.dropout or model.norm_place != "pre"  # the branch has its own gradient, besides the stream's
            return with_memory(op, frees_temporary=self.full // self.parts if own else self.full)
        return op

    # -- query, key and value --------------------------------------------------------------------------------------

    @property
    def projected(self) -> int:
        """Bytes of the projected query, key and value that are saved for the backward pass."""
        if not self.shape.keeps_qkv:
            return 0
        whole = self.query + self.key_value
        if not self.split:  # all three are views of one tensor
            return whole if not self.divides_sequence or self.keeps_query else 0
        if self.divides_sequence:  # gathered keys and values are saved instead
            return self.query if self.keeps_query else 0
        return whole if self.keeps_query else self.key_value // 2

    @property
    def rotated(self) -> int:
        """Bytes of saved rotated copies; those of keys are gathered instead under context parallelism."""
        model, shape = self.shape.model, self.shape
        if model.positions != "rope" or shape.composes_attention:
            return 0
        return self.query if self.divides_sequence else shape.rotated_bytes

    @property
    def gathered(self) -> int:
        """Bytes of the whole sequence's keys and values, the masks of two chunks, and their concatenated output."""
        if not self.divides_sequence:
            return 0
        chunk = self.shape.sequence // 2
        masks = chunk * chunk * (2 * self.cp + 1) * self.shape.matmul_bytes
        return self.cp * self.key_value + masks + self.query

    def attention(self, op: Operation, forward: bool) -> Operation:
        shape, whole = self.shape, self.query + self.key_value
        freed_bytes = (whole if shape.keeps_qkv else 0) - self.projected
        if op.name == "qkv" and op.kind is Kind.MATMUL and forward:
            return with_memory(op, saved=-freed_bytes, temporary=freed_bytes)
        if op.name == "qkv_cast" and forward and not self.seen_input_cast:  # the next `qkv_cast` casts the weights
            self.seen_input_cast = True
            casts = 3 if self.split else 1  # each layer makes its own cast of the input
            return fast_replace(op, saved_bytes=casts * op.saved_bytes)
        if op.name == "qkv" and op.kernel == "concatenate":
            held = self.projected if shape.keeps_qkv else 0
            made = 0 if self.split else op.temporary_bytes
            freed = op.frees_temporary_bytes - op.temporary_bytes + made
            return fast_replace(op, temporary_bytes=made, frees_saved_bytes=held, frees_temporary_bytes=freed)
        if op.name == "qkv" and op.kernel == "matmul" and not forward and self.split:
            return with_memory(op, scratch=self.cast)  # three layers compute gradients of the same input
        if op.name == "qkv" and op.kernel == "matmul_weight_gradient" and self.split and shape.casts:
            return with_memory(op, frees_saved=2 * self.cast)
        last = "rotary" if shape.model.positions == "rope" else "qk_norm"
        if op.name == last and forward and not self.divides_sequence:
            return with_memory(op, frees_temporary=freed_bytes)
        gathers_rotated = self.divides_sequence and not shape.composes_attention
        unsaved_bytes = shape.rotated_bytes - self.rotated if gathers_rotated else 0
        if op.name == "rotary" and forward:
            return with_memory(op, saved=-unsaved_bytes, temporary=unsaved_bytes)
        if op.kind is Kind.ATTENTION and op.name == "attention" and self.divides_sequence:
            return self.gathering(op, forward, freed_bytes + unsaved_bytes, unsaved_bytes)
        return op

    def latent_attention(self, op: Operation, forward: bool) -> Operation:
        """A rank's keys and values are gathered, then freed; those of the whole sequence are saved instead."""
        half = self.key_value // 2  # keys; values are padded to their width
        if op.kernel in ("rotary", "pad") and forward:
            return with_memory(op, saved=-half, temporary=half)
        return self.gathering(op, forward, self.key_value, self.key_value) if op.kind is Kind.ATTENTION else op

    def gathering(self, op: Operation, forward: bool, freed_bytes: int, unsaved_bytes: int) -> Operation:
        """Attention that gathers keys and values and saves them: `freed_bytes` of this rank's are freed, of which
        `unsaved_bytes` are not saved for the backward pass."""
        scratch = 2 * self.cp * self.key_value
        if forward:
            return with_memory(op, saved=self.gathered, frees_temporary=freed_bytes, scratch=scratch)
        return with_memory(op, frees_saved=self.gathered - unsaved_bytes, scratch=scratch)
