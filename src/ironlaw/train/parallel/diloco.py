"""Training at several sites whose links are too slow for gradients (DiLoCo, arXiv 2311.08105).

    diloco = DiLoCo(rank_model, config)
    optimizer.step(); diloco.after(step)     # every `local_steps` steps the sites synchronize

Each site (a group of replicas with any layout) trains by itself with its own optimizer state. When sites synchronize,
the mean of (common weights - own weights) is the gradient of an outer step on the common weights, by SGD with
Nesterov's momentum; all sites continue from the result. The common weights are evaluated, saved as the run's weights
and exported. Checkpoints also hold each site's own weights and optimizer state, so that a run resumes bit for bit. If
the sites have changed, new ones start from the common weights with the first site's optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ironlaw.config import RunConfig
from ironlaw.model.linear import local_part
from ironlaw.train.average import swapped
from ironlaw.train.parallel.apply import RankModel
from ironlaw.train.parallel.materialize import COPY, named_like
from ironlaw.train.parallel.store import StepPlugin

CHUNK_ELEMENTS = 8 * 2**20
"""Number of elements reduced at a time: large enough for the bandwidth, small compared with the model."""


def plugin_for(rank_model: RankModel, config: RunConfig) -> DiLoCo | None:
    return DiLoCo(rank_model, config) if rank_model.ranks.sites > 1 else None


class DiLoCo(StepPlugin):
    """The common weights and their optimizer, for the part of the model that this rank holds."""

    name = "outer"

    def __init__(self, rank_model: RankModel, config: RunConfig) -> None:
        ranks, communication = rank_model.ranks, config.communication
        self.every, self.last = communication.local_steps, config.train.steps
        self.model, self.group = rank_model.model, ranks.group("site")
        self.site, self.sites = ranks.index("site"), ranks.sites
        self.sent = torch.bfloat16 if communication.gradients == "bf16" else torch.float32
        self.own = list(rank_model.model.parameters())
        self.common = [nn.Parameter(p.detach().clone()) for p in self.own]
        momentum = communication.outer_momentum
        self.optimizer = torch.optim.SGD(
            self.common, lr=communication.outer_lr, momentum=momentum, nesterov=momentum > 0, foreach=False
        )
        self._reset_momentum()

    def _reset_momentum(self) -> None:
        """Set momentum to the zeros that SGD starts from implicitly, so that it can be saved before the first step."""
        for parameter in self.common:
            self.optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    def after(self, step: int) -> None:
        """Synchronize the sites if it is due, and after the run's last step."""
        if step % self.every == 0 or step == self.last:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        for start, stop in _chunks([local_part(p).numel() for p in self.own]):
            moved = [
                (local_part(c) - local_part(o)).flatten()
                for c, o in zip(self.common[start:stop], self.own[start:stop], strict=True)
            ]
            sizes = [part.numel() for part in moved]
            flat = torch.cat(moved).to(self.sent)
            del moved
            dist.all_reduce(flat, group=self.group)
            mean = flat.float().div_(self.sites)
            for parameter, part in zip(self.common[start:stop], mean.split(sizes), strict=True):
                parameter.grad = torch.empty_like(parameter)
                local_part(parameter.grad).copy_(part.view_as(local_part(parameter)))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._go_on_from_common()

    @torch.no_grad()
    def _go_on_from_common(self) -> None:
        for own, common in zip(self.own, self.common, strict=True):
            local_part(own).copy_(local_part(common))

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context in which the common weights are in the place of this site's own."""
        return swapped(self.common, self.own)

    def held(self) -> Any:
        return [*self.common, *self.optimizer.state.values()]

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _shared(self) -> dict[str, Tensor]:
        """Return the common weights under the run's own names, and the outer momentum."""
        common = {id(own): common.detach() for own, common in zip(self.own, self.common, strict=True)}
        kept = (self.optimizer.state[parameter]["momentum_buffer"] for parameter in self.common)
        momentum = dict(zip(common, kept, strict=True))
        return dict(named_like(self.model, "weights", common)) | dict(named_like(self.model, "outer", momentum))

    def _of_site(self, name: str) -> str:
        return f"site{self.site}/{name}"

    def tensors_to_save(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = {self._of_site(name): tensor for name, tensor in tensors.items()}
        first = {name: tensor for name, tensor in tensors.items() if self.site == 0 and name.startswith("optimizer/")}
        shared = {name: tensor.clone() for name, tensor in self._shared().items() if not name.endswith(COPY)}
        return mine | first | shared

    def tensors_to_read(self, tensors: dict[str, Tensor], known: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Select this site's own state if the checkpoint has it, otherwise the run's."""
        self._starts_anew = not any(key.startswith(self._of_site("")) for key in known)
        self._reset_momentum()
        if self._starts_anew:
            own = {name: tensor for name, tensor in tensors.items() if not name.startswith("weights/")}
        else:
            own = {self._of_site(name): tensor for name, tensor in tensors.items()}
        momentum_saved = any(key.startswith("outer/") for key in known)
        shared = {n: t for n, t in self._shared().items() if momentum_saved or not n.startswith("outer/")}
        return own | shared

    def after_read(self) -> None:
        if self._starts_anew:
            self._go_on_from_common()


def _chunks(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive tensors with about `CHUNK_ELEMENTS` elements each."""
    start = total = 0
    for index, size in enumerate(sizes):
        total += size
        if total >= CHUNK_ELEMENTS:
            yield start, index + 1
            start, total = index + 1, 0
    if start < len(sizes):
        yield start, len(sizes)
