"""What a kind of device cannot do, said before anything runs."""

from __future__ import annotations

from ironlaw.config import RunConfig
from ironlaw.errors import UserError

ONLY_ON_CUDA = {
    "tf32": 'a CPU computes fp32 in full: use train.precision = "fp32"',
    "fp8": 'a CPU has no fp8 products: use train.precision = "bf16"',
    "mxfp8": 'a CPU has no mxfp8 products: use train.precision = "bf16"',
}


NOT_ON_THE_HOST = ("adam8bit", "galore", "muon")


def check_supported(config: RunConfig, device: str) -> None:
    """UserError for what needs CUDA on a device without it. What a CUDA device itself lacks is found when it trains."""
    train = config.train
    if train.offloads_optimizer and config.optimizer.name in NOT_ON_THE_HOST:
        raise UserError(
            f'train.offload = "{train.offload}" updates on the host, which {config.optimizer.name} does not: use '
            'optimizer.name = "adamw"'
        )
    if train.offloads_optimizer and train.precision == "fp16":
        raise UserError(
            f'train.offload = "{train.offload}" updates on the host, where no loss scale is undone: use '
            'train.precision = "bf16"'
        )
    if device == "cuda":
        return
    if train.precision in ONLY_ON_CUDA:
        raise UserError(f'train.precision = "{train.precision}" needs an NVIDIA GPU; {ONLY_ON_CUDA[train.precision]}')
    if train.compile == "graphs":
        raise UserError('train.compile = "graphs" needs CUDA graphs, which a CPU has not: use train.compile = "on"')
    if train.offload != "none":
        raise UserError(
            f'train.offload = "{train.offload}" moves memory from a GPU to the host, and there is no GPU: use "none"'
        )
