"""Gradient reduction in fewer than 32 bits, by PyTorch's communication hooks: bf16, or PowerSGD (arXiv 1905.13727).

DDP takes a hook, FSDP2 a type for its reductions. PowerSGD keeps its matrices and, per rank, the error of the last
step, by bucket. This state is saved rank by rank; a run resumed on the same number of ranks continues bit for bit.

DDP compares the annotations of hooks with types, so annotations must not be strings in this file.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ironlaw.config import CommunicationConfig, RunConfig
from ironlaw.train.parallel.apply import RankModel
from ironlaw.train.parallel.communication import bucket_hook
from ironlaw.train.parallel.store import StepPlugin

EPSILON = 1e-8
"""Added to the norm of a column: gradients of a lower rank than PowerSGD's have zero columns."""


def plugin_for(rank_model: RankModel, config: RunConfig) -> "PowerSGD | None":
    """Register the configured hook on DDP. The default reduction is a hook, too, so that it can be observed."""
    model, communication = next(iter(rank_model.stages.values())), config.communication
    if not isinstance(model, DistributedDataParallel):
        return None
    group = model.process_group
    if communication.gradients == "powersgd":
        compressor = PowerSGD(group, communication, rank_model.ranks.device)
        model.register_comm_hook(compressor, bucket_hook(PowerSGD.reduce, group))
        return compressor
    reduce = _in_bf16 if communication.gradients == "bf16" else default_hooks.allreduce_hook
    model.register_comm_hook(group, bucket_hook(reduce, group))
    return None


def _in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """PyTorch's hook under another name: DDP rejects the original without NCCL, although gloo can sum bf16."""
    return default_hooks.bf16_compress_hook(group, bucket)


class PowerSGD(StepPlugin):
    """PyTorch's PowerSGD hook and its state, which is kept by bucket. DDP regroups buckets after the first pass."""

    name = "powersgd"

    def __init__(self, group: dist.ProcessGroup, communication: CommunicationConfig, device: torch.device) -> None:
        self.group, self.device, self._buckets_final = group, device, False
        self.state = powerSGD_hook.PowerSGDState(
            group, communication.rank, communication.start_step, orthogonalization_epsilon=EPSILON
        )

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if not self._buckets_final:
            return default_hooks.allreduce_hook(self.group, bucket)
        future = powerSGD_hook.powerSGD_hook(self.state, bucket)
        if bucket.buffer().device.type == "cpu":
            # gloo runs the rest of the hook on its few threads, where it waits for further reductions: two buckets at
            # once could deadlock.
            future.wait()
        return future

    def begin(self, part: nn.Module, tokens: Tensor) -> None:
        settle_buckets(part, tokens)
        self._buckets_final = True

    def held(self) -> Any:
        return [self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict]

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.state.iter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.iter = int(state["steps"])

    def _named(self) -> dict[str, dict[int, Tensor]]:
        """Return the state by name. The matrices are equal on all ranks; the errors belong to each rank."""
        own = f"powersgd/left_out/{dist.get_rank(self.group)}of{dist.get_world_size(self.group)}"
        state = self.state
        return {own: state.error_dict, "powersgd/p": state.p_memory_dict, "powersgd/q": state.q_memory_dict}

    def tensors_to_save(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {f"{name}/{bucket}": t.clone() for name, kept in self._named().items() for bucket, t in kept.items()}
        return tensors | own

    def tensors_to_read(self, tensors: dict[str, Tensor], known: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Allocate the state that the checkpoint has. For another number of ranks it is not read: errors are lost."""
        found: dict[str, Tensor] = {}
        for name, kept in self._named().items():
            kept.clear()
            for bucket in (int(key.removeprefix(name + "/")) for key in known if key.startswith(name + "/")):
                kept[bucket] = found[f"{name}/{bucket}"] = torch.empty(known[f"{name}/{bucket}"])
        if not self.state.error_dict:  # the matrices start over too
            found = {}
            self.state.p_memory_dict.clear()
            self.state.q_memory_dict.clear()
        return tensors | found

    def after_read(self) -> None:
        for kept in self._named().values():
            for bucket, tensor in kept.items():
                kept[bucket] = tensor.to(self.device)


def settle_buckets(part: nn.Module, tokens: Tensor) -> None:
    """Run a pass and discard its gradients, after which DDP's buckets no longer change."""
    part.eval()
    part(tokens, tokens).backward()
    part.zero_grad(set_to_none=True)
    part.train()
