"""The parts of sequences, heads and vocabulary that a rank computes under tensor, sequence and context
parallelism."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ironlaw.model.loss import IGNORED, chunked_cross_entropy
from ironlaw.model.partition import ComputePartition, Draw, Rows
from ironlaw.train.parallel.ranks import Ranks


def positions_of(rank: int, cp: int, sequence: int) -> Tensor:
    """Return the positions of a sequence that context-parallel rank `rank` holds, in its order."""
    if cp == 1:
        return torch.arange(sequence)
    chunk = sequence // (2 * cp)
    first, last = rank * chunk, (2 * cp - 1 - rank) * chunk
    return torch.cat((torch.arange(first, first + chunk), torch.arange(last, last + chunk)))


class RankPartition(ComputePartition):
    """A rank's part. Context-parallel rank r takes the r-th and the r-th last of 2 cp chunks of every sequence, so that
    all ranks have the same work under a causal mask (Llama 3, arXiv 2407.21783, section 3.3.2)."""

    def __init__(self, ranks: Ranks) -> None:
        config = ranks.layout
        self.tp, self.tp_rank = config.tp, ranks.index("tp")
        self.sp = config.sp
        self.cp, self.cp_rank = config.cp, ranks.index("cp")
        self.mesh: DeviceMesh | None = ranks.context
        self.tensor_mesh = ranks.mesh["tp"]

    def sequence(self, tokens: Tensor) -> int:
        divided = self.tp if self.sp and tokens.dim() == 3 else 1  # hidden states of the previous stage are divided
        return tokens.shape[1] * self.cp * divided

    def positions(self, sequence: int) -> Rows:
        return slice(sequence) if self.cp == 1 else positions_of(self.cp_rank, self.cp, sequence)

    def stream_positions(self, sequence: int) -> Rows:
        rows = self.positions(sequence)
        if not self.sp:
            return rows
        rows = torch.arange(sequence) if isinstance(rows, slice) else rows
        return rows.chunk(self.tp)[self.tp_rank]

    def heads(self, heads: int) -> slice:
        here = heads // self.tp
        return slice(self.tp_rank * here, (self.tp_rank + 1) * here)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, draw: Draw | None,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        if self.cp == 1:
            return super().attend(query, key, value, mask, dropout, draw, scale)
        key, value = self._gather(key, value)
        if draw is not None and dropout:
            return draw.attention(query, key, value, mask, scale)
        chunks = enumerate(query.chunk(2, dim=2))
        return torch.cat([self._attend_chunk(i, q, key, value, mask, dropout, scale) for i, q in chunks], dim=2)

    def chunked_loss(
        self, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, reduction: str, onednn: bool
    ) -> Tensor:
        if self.tp == 1:
            return super().chunked_loss(x, weight, targets, chunk, reduction, onednn)
        assert isinstance(weight, DTensor)
        # Every rank needs all hidden states for its part of the vocabulary, and has a part of their gradient.
        stream: Placement = Shard(1) if self.sp else Replicate()
        here = DTensor.from_local(x, self.tensor_mesh, [stream], run_check=False)
        x = here.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).flatten(0, 1)
        _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        of_logits = partial(loss_and_gradient, offset[0], self.tensor_mesh.get_group())
        return chunked_cross_entropy(x, weight.to_local(), targets, chunk, reduction, onednn, of_logits)

    def _attend_chunk(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        """Compute attention of one of the two chunks with the keys up to its end; all later keys are masked."""
        chunk, sequence = query.shape[2], key.shape[2]
        place = (self.cp_rank, 2 * self.cp - 1 - self.cp_rank)[index]
        end = (place + 1) * chunk
        if mask is None:
            rows = torch.arange(end - chunk, end, device=query.device)
            here = rows[:, None] >= torch.arange(end, device=query.device)
        else:
            here = mask[..., index * chunk : (index + 1) * chunk, :end]
        assert end <= sequence
        return F.scaled_dot_product_attention(
            query, key[:, :, :end], value[:, :, :end], attn_mask=here, dropout_p=dropout,
            enable_gqa=key.shape[1] != query.shape[1], scale=scale,
        )  # fmt: skip

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the whole sequence, in order: an all-gather, with a reduce-scatter as backward."""
        assert self.mesh is not None
        both = torch.stack((key, value))  # (2, B, K, S / cp, D)
        whole = DTensor.from_local(both, self.mesh, [Shard(3)], run_check=False).redistribute(placements=[Replicate()])
        local = whole.to_local(grad_placements=[Partial()])
        order = torch.cat([positions_of(rank, self.cp, local.shape[3]) for rank in range(self.cp)]).argsort()
        key, value = local[:, :, :, order.to(local.device)].unbind(0)
        return key, value


def loss_and_gradient(
    first: int, group: dist.ProcessGroup, logits: Tensor, targets: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """`loss.loss_and_gradient` from the logits of a part of the vocabulary, from token `first` on (arXiv 1909.08053).

    Two all-reduces in `group`, of a few bytes per token, share the largest logit, then the sum of exponentials and the
    target's own logit. From these each rank computes the loss and the gradient of its logits.
    """
    logits = logits.float()  # (T, size of this part)
    most = logits.amax(-1)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    logits.sub_(most.unsqueeze(1))
    word = targets - first
    here = (word >= 0) & (word < logits.shape[1])  # False for ignored targets, which are negative
    place = word.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    own = logits.gather(1, place).squeeze(1) * here
    exponentials = logits.exp_()
    together = torch.stack((exponentials.sum(-1), own))
    dist.all_reduce(together, group=group)
    total, own = together.unbind()
    loss = ((total.log() - own) * (targets != IGNORED)).sum()
    if not wanted:
        return loss, None
    gradient = exponentials.div_(total.unsqueeze(1))
    return loss, gradient.scatter_add_(1, place, -here.unsqueeze(1).to(gradient.dtype))
