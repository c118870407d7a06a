"""The program of a step that trains adapters only: a rewrite of the one that trains everything.

Frozen tensors have no gradient: the products that give one, their casts and the first block's gradient of its input
vanish, and so does a norm's copy of its normalised input. Each adapter adds two products forward and four backward;
what waits between is (tokens, rank). Inputs of matrices without an adapter are counted as kept, which they are not:
with `targets` other than all the plan is a little above.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from ironlaw.ledger import Kind
from ironlaw.workload.blocks import FP32, Shape, norm_saved_bytes
from ironlaw.workload.finetune import FinetuneConfig, Target
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import state_bytes, update_operations
from ironlaw.workload.parameters import model_parameters
from ironlaw.workload.program import EMBEDDING, Layer, Program, Stage
from ironlaw.workload.recompute import AGAIN
from ironlaw.workload.tensors import Tensor

# Linear layers of a block, and the names of their products.
NAMES = {
    "attention.qkv": "qkv", "attention.out": "attention_out", "ffn.up": "ffn_up", "ffn.gate": "ffn_gate",
    "ffn.down": "ffn_down",
}  # fmt: skip
NF4_BITS, NF4_BLOCK, SCALES_BLOCK = 4, 64, 256  # numerics/frozen_linear.py
DEQUANTISING_BYTES = 17  # a number at the highest moment: codes apart, as indices, their values, times their scales


def finetuned(program: Program, config: FinetuneConfig, targets: Sequence[Target]) -> Program:
    """Of one process."""
    assert program.shape is not None and program.model is not None
    model, recipe = program.model, program.recipe
    trained = [parameter for target in targets for parameter in target.parameters(config)]
    whole = _Rewrite(program.shape, config, targets)
    layers = whole.layers(program.stages[0].layers)
    remainder: tuple[Layer, ...] = ()
    if program.remainder:
        assert program.batch is not None
        rest = program.batch.sequences % program.layout.micro_batch
        remainder = _Rewrite(replace(program.shape, micro_batch=rest), config, targets).layers(program.remainder)
    update = update_operations(trained, recipe.optimizer, accumulation=program.micro_batches, cuda=recipe.cuda)
    stage = Stage(layers, program.stages[0].parameters, tuple(trained), tuple(update))
    adapters, state = sum(p.elements for p in trained) * FP32, state_bytes(trained, recipe.optimizer)
    frozen = frozen_bytes(program, config)
    buffers = sum(t.bytes for t in program.tensors[0] if t.component == "weights") - model.parameters * FP32
    average = adapters if recipe.average else 0
    sizes = {
        "weights": frozen + buffers + adapters, "optimizer": state, "average": average,
        "checkpoint copy": adapters + state + average,
    }  # fmt: skip
    tensors = tuple(Tensor(t.component, sizes.get(t.component, t.bytes), t.note) for t in program.tensors[0])
    return replace(program, stages=(stage,), remainder=remainder, tensors=(tensors,))


def frozen_bytes(program: Program, config: FinetuneConfig) -> int:
    """Of the base as it is held: in fp32, but for matrices of the blocks in 16 bits (LoRA under autocast) or nf4."""
    assert program.model is not None and program.shape is not None
    total = 0
    for parameter in model_parameters(program.model):
        rows_of = parameter.elements // parameter.shape[-1]
        if not parameter.is_block_matrix or config.method == "dora":
            total += parameter.elements * FP32
        elif config.method == "qlora":
            scales = rows_of * -(-parameter.shape[-1] // NF4_BLOCK)
            groups = -(-scales // SCALES_BLOCK)
            total += scales * NF4_BLOCK * NF4_BITS // 8 + groups * SCALES_BLOCK + groups * FP32 + FP32
        else:
            total += parameter.elements * program.shape.matmul_bytes
    return total


@dataclass
class _Rewrite:
    shape: Shape
    config: FinetuneConfig
    targets: Sequence[Target]

    def layers(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """Layers that shared their operations share them again."""
        made: dict[tuple[object, ...], Layer] = {}
        result = []
        for layer in layers:
            here: dict[str, list[Target]] = {}
            for target in self.targets:
                if target.layer.startswith(f"{layer.name}."):
                    here.setdefault(NAMES[target.layer.removeprefix(f"{layer.name}.")], []).append(target)
            first = layer.name == "blocks.0"
            key = (id(layer.forward), id(layer.recomputed), first, *((n, len(t)) for n, t in sorted(here.items())))
            if key not in made:
                backward = () if layer.name == EMBEDDING else tuple(self._backward(layer.backward, here, first))
                forward = tuple(self._forward(layer.forward, here, first))
                again = tuple(self._forward(layer.recomputed, here, first=False))
                if layer.recomputed:  # the last of the forward pass lets go of what is made again
                    more = sum(op.saved_bytes for op in forward) - sum(op.saved_bytes for op in layer.forward)
                    more += 0 if self._casts_weights else layer.cast_weight_bytes
                    drops = replace(forward[-1], frees_saved_bytes=forward[-1].frees_saved_bytes + more)
                    forward = (*forward[:-1], drops)
                made[key] = replace(
                    layer,
                    forward=forward,
                    backward=backward,
                    recomputed=again,
                    cast_weight_bytes=layer.cast_weight_bytes if self._casts_weights else 0,
                )
            result.append(replace(made[key], name=layer.name))
        return tuple(result)

    @property
    def _casts_weights(self) -> bool:
        """Whether autocast still casts the frozen matrices of the blocks."""
        return self.shape.casts and self.config.method == "dora"

    def _forward(
        self, operations: Sequence[Operation], here: dict[str, list[Target]], first: bool
    ) -> Iterator[Operation]:
        for op, following in zip_longest(operations, operations[1:]):
            # Autocast casts a matrix right before its product, what is multiplied before that; what is computed again
            # ends before the last product.
            casts_weight = op.kernel == "cast" and (following is None or following.matmul is not None)
            if op.group == "embedding" and self._starts_plain:
                op = replace(op, saved_bytes=0)
            if op.kernel == "matmul_weight_gradient":  # of a loss in chunks
                left = op.frees_temporary_bytes - op.temporary_bytes
                yield replace(op, repeat=0, flops=None, matmul=None, temporary_bytes=0, frees_temporary_bytes=left)
                continue
            if op.kind is Kind.NORM:
                op = replace(op, saved_bytes=op.saved_bytes - self._not_saved(op, first))
            if op.name == "head_cast" and not casts_weight:
                op = replace(op, saved_bytes=0)
            if op.group != "head" and casts_weight and not self._casts_weights:
                continue
            product = op.matmul is not None
            if product and op.group != "head" and self.config.method == "qlora":
                yield self._dequantise(op)
            yield op
            if product:
                yield from self._adapters(op, here.get(op.name.removesuffix(AGAIN), ()))

    def _backward(
        self, operations: Iterable[Operation], here: dict[str, list[Target]], first: bool
    ) -> Iterator[Operation]:
        reached = False  # in the first block, of what is before its first adapter nothing is asked
        firsts = [name for name in NAMES.values() if name in here][:1] if first else []
        for op in operations:
            casts_gradient = op.kernel == "cast" and op.gradient_bytes > 0
            op = replace(op, gradient_bytes=0)
            if op.kind is Kind.NORM:
                freed = op.frees_saved_bytes - self._normalised(op)
                op = replace(op, frees_saved_bytes=0 if self._is_first(op, first) else freed)
            if op.kernel == "matmul_weight_gradient":
                yield self._no_product(op)
                continue
            if casts_gradient:
                continue
            if op.kernel == "sum_rows":  # of biases
                yield replace(op, repeat=0)
                continue
            if op.matmul is not None:
                if op.group != "head" and self.config.method == "qlora":
                    yield self._dequantise(op)
                stops = op.name in firsts
                yield from self._adapters_backward(op, here.get(op.name, ()), asked=not stops)
                if here.get(op.name) and not stops:  # two gradients of one input become one
                    op = replace(op, frees_temporary_bytes=op.frees_temporary_bytes + op.temporary_bytes)
                reached = reached or stops
                if stops:
                    op = replace(op, repeat=0, flops=None, matmul=None, temporary_bytes=0)
            yield replace(op, repeat=0, flops=None) if reached else op

    def _no_product(self, op: Operation) -> Operation:
        """Its memory but the gradient's and, where the weight is not cast any more, that of the copy."""
        copy = op.temporary_bytes if self.shape.casts else 0
        freed = op.frees_saved_bytes - (0 if self._casts_weights else copy)
        if op.group == "head":  # whose input nothing keeps
            freed = copy
        return replace(op, repeat=0, flops=None, matmul=None, temporary_bytes=0, frees_saved_bytes=freed)

    def _normalised(self, op: Operation) -> int:
        """What a composed RMSNorm keeps for its weight's gradient."""
        composed = self.shape.model.norm == "rmsnorm" and not self.shape.fused_rmsnorm
        return op.elements * FP32 if composed and op.kernel.startswith("rmsnorm") else 0

    @property
    def _starts_plain(self) -> bool:
        """Whether nothing before the first block's adapters waits for the backward pass."""
        if self.shape.recompute and self.shape.recompute[0] is not None:  # its input is what it is made again from
            return False
        return self.shape.model.norm_place == "pre" and any(t.layer == "blocks.0.attention.qkv" for t in self.targets)

    def _is_first(self, op: Operation, first: bool) -> bool:
        return first and op.name == "attention_norm" and self._starts_plain

    def _not_saved(self, op: Operation, first: bool) -> int:
        """Of what a norm saves: its own and, of the last one, the input of the output layer."""
        if self._is_first(op, first):
            return norm_saved_bytes(self.shape, self.shape.tokens, self.shape.model.hidden)
        last = op.group == "head" and not self.shape.casts and not self.shape.loss_chunk
        return self._normalised(op) + (self.shape.normed_bytes if last else 0)

    def _dequantise(self, op: Operation) -> Operation:
        assert op.matmul is not None
        elements = op.matmul[1] * op.matmul[2]
        size = DEQUANTISING_BYTES * elements
        return Operation(
            f"{op.name}_dequantise", Kind.ELEMENTWISE, op.phase, op.group, "add", op.repeat, elements=elements,
            bytes_moved=size, temporary_bytes=size, frees_temporary_bytes=size,
        )  # fmt: skip

    def _adapters(self, op: Operation, targets: Sequence[Target]) -> Iterator[Operation]:
        """Down, up, and the sum with what the frozen matrix gives."""
        assert op.matmul is not None
        (tokens, outputs, inputs), rank, w = op.matmul, self.config.rank, self.shape.matmul_bytes
        name = f"{op.name.removesuffix(AGAIN)}_adapter{AGAIN * op.name.endswith(AGAIN)}"
        for target in targets:
            rows = target.stop - target.start
            casts = rank * (rows + inputs) * w if self.shape.casts else 0
            yield _product(op, name, tokens, rank, inputs, w, saved=tokens * rank * w + casts)
            yield _product(op, name, tokens, rows, rank, w)
            if self.config.method == "dora":  # lengths of the rows; what is stretched waits
                yield _product(op, name, rows, inputs, rank, FP32, saved=tokens * rows * w)
        if targets:
            size = 2 * tokens * outputs * w  # the frozen product and the adapters', beside their sum
            yield Operation(
                name, Kind.ELEMENTWISE, op.phase, op.group, "add", op.repeat, elements=tokens * outputs,
                bytes_moved=3 * tokens * outputs * w, temporary_bytes=size, frees_temporary_bytes=size,
            )  # fmt: skip

    def _adapters_backward(self, op: Operation, targets: Sequence[Target], asked: bool) -> Iterator[Operation]:
        assert op.matmul is not None
        (tokens, inputs, _), rank, w = op.matmul, self.config.rank, self.shape.matmul_bytes
        name = f"{op.name}_adapter"
        for target in targets:
            rows = target.stop - target.start
            casts = rank * (rows + inputs) * w if self.shape.casts else 0
            freed = tokens * rank * w + casts + (tokens * rows * w if self.config.method == "dora" else 0)
            length = rows * FP32 if self.config.method == "dora" else 0
            yield _product(op, name, rows, rank, tokens, w, gradient=rows * rank * FP32 + length, freed=freed)
            yield _product(op, name, tokens, rank, rows, w)
            yield _product(op, name, rank, inputs, tokens, w, gradient=rank * inputs * FP32)
            if asked:
                size = tokens * inputs * w
                others = 0 if target is targets[0] else size  # added in place to the first
                yield replace(
                    _product(op, name, tokens, inputs, rank, w), temporary_bytes=size, frees_temporary_bytes=others
                )


def _product(
    like: Operation, name: str, m: int, n: int, k: int, w: int, saved: int = 0, gradient: int = 0, freed: int = 0
) -> Operation:
    weight = "_weight_gradient" if gradient else ""
    return Operation(
        name, Kind.MATMUL, like.phase, like.group, f"matmul{weight}", like.repeat, matmul=(m, n, k),
        flops=2 * m * n * k, bytes_moved=w * (m * n + m * k + n * k), saved_bytes=saved, gradient_bytes=gradient,
        frees_saved_bytes=freed,
    )  # fmt: skip
