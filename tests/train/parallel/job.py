"""Runs many cases on N gloo ranks of one process group: `python job.py N`, batches of cases on stdin, see `main`.

Processes are forked from one that has imported PyTorch: starting each would cost seconds. A case is
{"task": .., "model": {..}, "layout": {..}, "train": {..}, ...}; tasks are the functions named `task_*`. What the ranks
found of case n is in `resultN.json` of the batch's folder.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from torch._dynamo import lookup_backend as look_up_backend

from ironlaw.config import CheckpointConfig, RunConfig, build_config, load_config
from ironlaw.data.batch import IGNORED, Batch
from ironlaw.data.batches import Batches, TokenWindows
from ironlaw.errors import UserError
from ironlaw.ledger import Decisions
from ironlaw.machine.profile import load_profile
from ironlaw.model.linear import onednn_available
from ironlaw.model.moe import update_routing
from ironlaw.model.transformer import Transformer
from ironlaw.observe.clock import StepClock
from ironlaw.plan.recipe import batch_of, recipe_of
from ironlaw.plan.step import with_adapters
from ironlaw.train import loop, session
from ironlaw.train.average import WeightAverage
from ironlaw.train.checkpoint import AdapterFiles, RandomState, name_of
from ironlaw.train.checkpointer import Checkpointer
from ironlaw.train.jsonl import read_lines
from ironlaw.train.mesh import Mesh
from ironlaw.train.noise_scale import first_part
from ironlaw.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from ironlaw.train.parallel import apply as layouts
from ironlaw.train.parallel import compilation
from ironlaw.train.parallel import ranks as world
from ironlaw.train.parallel.communication import counted, observed
from ironlaw.train.parallel.job import RankJob, check_equal, rank_facts
from ironlaw.train.parallel.materialize import build_on_meta, named_tensors
from ironlaw.train.parallel.step import LayoutStep, read_first_weights
from ironlaw.train.parallel.store import ShardedFiles, SharedAdapterFiles
from ironlaw.train.precision import LossScale, autocast
from ironlaw.train.step import Step
from ironlaw.workload.collectives import aliases_of, collectives, table_of
from ironlaw.workload.program import step as planned_step
from ironlaw.workload.recipe import Recipe
from ironlaw.workload.recompute import policies as layer_policies

STEPS = 10
CHUNK_TOKENS = 24
GPT = {"name": "gpt", "layers": 4, "hidden": 32, "heads": 4, "vocab": 300, "context": 16}
LLAMA = GPT | {
    "name": "llama", "ffn": 48, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope",
    "bias": False, "tied": False,
}  # fmt: skip
# Experts of every kind: a dense layer, shared ones, a loss or a bias, with a capacity and without.
MIXTRAL = LLAMA | {"name": "mixtral", "ffn": 24, "moe": {"experts": 4, "experts_per_token": 2, "balance_loss": 0.1}}
DEEPSEEK = LLAMA | {
    "name": "deepseek", "moe": {
        "experts": 8, "experts_per_token": 3, "expert_ffn": 16, "shared_experts": 1, "shared_gate": True,
        "dense_layers": 1, "score": "sigmoid", "balance": "bias", "bias_rate": 0.01,
    },
}  # fmt: skip
SWITCH = GPT | {
    "name": "switch", "bias": False,
    "moe": {"experts": 4, "experts_per_token": 1, "capacity_factor": 1.0, "every": 2, "balance_loss": 0.1},
}  # fmt: skip
# Latent attention; the second as in DeepSeek-V3, but for the bias of the choice: with groups, rounding decides ties.
LATENT = LLAMA | {
    "name": "latent", "latent": {"key_value_rank": 12, "plain_size": 8, "rotary_size": 4, "value_size": 10},
}  # fmt: skip
DEEPSEEK3 = DEEPSEEK | {
    "name": "deepseek3", "latent": LATENT["latent"] | {"query_rank": 20},
    "moe": DEEPSEEK["moe"] | {"shared_gate": False, "groups": 4, "groups_per_token": 2, "balance": "none"},
}  # fmt: skip
FAMILIES = {
    "gpt": GPT, "llama": LLAMA, "mixtral": MIXTRAL, "deepseek": DEEPSEEK, "switch": SWITCH, "latent": LATENT,
    "deepseek3": DEEPSEEK3,
}  # fmt: skip
# Every token is likely followed by the next one: something to learn, so that losses move.
_chance = np.random.default_rng(0)
TOKENS = (np.arange(4000) + _chance.integers(0, 3, 4000).cumsum()) % 300


def config_of(case: dict[str, Any]) -> RunConfig:
    return build_config(
        {
            "model": FAMILIES[case.get("family", "gpt")] | case.get("model", {}),
            "train": {"steps": STEPS, "global_batch": 8, "precision": "fp32"} | case.get("train", {}),
            "optimizer": {"lr": 3e-3} | case.get("optimizer", {}),
            "schedule": {"warmup_steps": 2},
            "layout": case["layout"],
            "communication": case.get("communication", {}),
            **case.get("tables", {}),
        }
    )


def planned_recipe(config: RunConfig) -> Recipe:
    """With chunks of which a micro-batch here has several."""
    recipe = with_adapters(recipe_of(config, config.train.precision), config)
    return replace(recipe, loss_chunk=CHUNK_TOKENS if config.train.loss == "chunked" else 0)


def batches_of(config: RunConfig, rank: int = 0, world: int = 1) -> Batches:
    size, seed = config.train.global_batch, config.train.seed
    windows = TokenWindows(TOKENS, config.sequence, seed, size)
    return Batches(windows, size, rank, world)


def in_documents(config: RunConfig, batch: Batch[Tensor]) -> Batch[Tensor]:
    """The same rows as if they were cut into documents and padded, unevenly, where the config says so."""
    if not config.data.mask_documents:
        return batch
    inputs = batch.inputs
    padded = torch.arange(inputs.shape[1]) >= inputs.shape[1] - inputs[:, :1] % 9
    return Batch(inputs, batch.targets.masked_fill(padded, IGNORED), (inputs % 5 == 0).cumsum(1).int())


class Run:
    """The model of a case under its layout, trained step by step."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        layout = world.check(config, dist.get_world_size())
        self.ranks = world.create_mesh(layout, sites=world.sites_of(config, layout))
        torch.manual_seed(config.train.seed)
        policies = layer_policies(config.recompute, config.model)
        decisions = Decisions(config.train.precision, planned_recipe(config).loss_chunk, policies)
        self.step = LayoutStep(config, decisions, self.ranks)
        self.rank_model, self.states = self.step.rank_model, self.step.states()
        self.batches = batches_of(config, self.ranks.index("dp"), self.ranks.layout.dp)
        self.small_squares: list[float | None] = []

    def train(self, first: int, last: int) -> list[tuple[float, float]]:
        results = []
        for step in range(first, last):
            batch = in_documents(self.config, self.batches.batch(step).map(torch.from_numpy))
            loss = self.step.forward_backward(batch, step)
            self.small_squares.append(self.step.small_square[1] if self.step.small_square else None)
            results.append(self.step.update(loss, step)[:2])
        return results


_alone: dict[str, Any] = {}


def once_alone(config: RunConfig) -> Any:
    """`train_alone`, on rank 0 and once for all layouts."""
    known = config.model_dump_json(exclude={"layout", "recompute"})
    if known not in _alone:
        found = [train_alone(config) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        _alone[known] = found[0]
    return _alone[known]


def train_alone(config: RunConfig) -> tuple[list[tuple[float, float]], dict[str, Tensor], int]:
    """The same in one process, without anything of `train/parallel`; and how many steps fp16 skipped. Averaged weights
    are under average/NAME."""
    torch.manual_seed(config.train.seed)
    model = Transformer(config.model)
    model.dropout_seed = config.train.seed
    optimizer = build_optimizer(model, config.optimizer)
    size = config.train.global_batch
    scaler = LossScale(torch.device("cpu"), config.train.precision, config.scaler)
    batches, results = batches_of(config), []
    decay = config.train.average_decay
    average = None if decay is None else WeightAverage(model, decay)
    norm = 0.0
    for step in range(config.train.steps):
        batch = in_documents(config, batches.batch(step).map(torch.from_numpy))
        samples, total = torch.arange(size) + step * size, 0.0
        for first in range(0, size, config.micro_batch):
            micro, here = (
                batch.rows(slice(first, first + config.micro_batch)),
                samples[first : first + config.micro_batch],
            )
            share = (micro.targets != IGNORED).sum() / (batch.targets != IGNORED).sum()
            with autocast(torch.device("cpu"), config.train.precision):
                loss = model(micro.inputs, micro.targets, here, micro.documents) * share
            scaler.scale(loss).backward()
            total += float(loss.detach())
        scaler.unscale_(optimizer)
        set_learning_rate(optimizer, learning_rate(config, step))
        norm_here = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip))
        norm = norm_here if scaler.step(optimizer) else norm  # of a step that was taken
        if average is not None:
            average.update()
        optimizer.zero_grad()
        if config.model.moe:
            update_routing(model)
        results.append((total, norm))
    biases = {name: bias for name, bias in model.named_buffers() if name.endswith("router.bias")}
    weights = {name: p.detach() for name, p in model.named_parameters()} | biases
    if average is not None:
        names = [name for name, _ in model.named_parameters()]
        weights |= {f"average/{name}": tensor for name, tensor in zip(names, average.tensors, strict=True)}
    return results, weights, scaler.skipped_steps


def weights_of(run: Run) -> dict[str, Tensor]:
    """Whole tensors of what this rank's stages hold, under the names of one process."""
    config, found = run.config.model, {}
    sizes = {"query": config.query_size, "key": config.key_value_size, "value": config.key_value_size}
    named = dict(run.rank_model.model.named_parameters())
    if run.step.average is not None:
        named |= {f"average/{name}": mine for name, mine in zip(list(named), run.step.average.tensors, strict=True)}
    for name, parameter in named.items():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = whole.detach().clone()
    found |= {name: bias for name, bias in run.rank_model.model.named_buffers() if name.endswith("router.bias")}
    for name in [name for name in found if ".qkv.query." in name]:
        parts = [found.pop(name.replace("query", part)) for part in sizes]
        found[name.replace(".query.", ".")] = torch.cat(parts)
    return found


def task_equivalence(case: dict[str, Any], folder: Path) -> dict[str, float]:
    """Largest differences over the run: loss (relative), final weights, and losses as they were."""
    run = Run(config_of(case))
    found = run.train(0, run.config.train.steps)
    expected, weights, skipped = once_alone(run.config)
    ours = weights_of(run)
    tied = {f"{of}head.weight": weights.get(f"{of}embedding.weight") for of in ("", "average/")}
    return {
        "loss": max(abs(a[0] - b[0]) / b[0] for a, b in zip(found, expected, strict=True)),
        "norm": max(abs(a[1] - b[1]) / (b[1] or 1.0) for a, b in zip(found, expected, strict=True)),
        "weights": max(float((value - (tied | weights)[name]).abs().max()) for name, value in ours.items()),
        "learned": expected[0][0] - found[-1][0],
        "skipped": run.step.scale.skipped_steps,
        "skipped_alone": skipped,
    }


def task_adapters(case: dict[str, Any], folder: Path) -> dict[str, float]:
    """Largest differences to one process: losses, norms, adapters; and after a checkpoint, which one process wrote."""
    run = Run(config_of(case))
    store, config, random = run.step.store, run.config, {"random": RandomState()}
    assert isinstance(store, SharedAdapterFiles)
    found = run.train(0, 5)
    ours = run.step.trained()
    alone = config.model_copy(update={"layout": None})
    torch.manual_seed(config.train.seed)
    one = Step(alone, Decisions(config.train.precision), Mesh(torch.device("cpu")))
    expected, batches = [], batches_of(alone)
    for step in range(8):
        if step == 5 and dist.get_rank() == 0:
            AdapterFiles().write(folder, AdapterFiles().take(one.model, one.states() | random))
            theirs = {name: tensor.detach().clone() for name, tensor in one.trained().items()}
        batch = batches.batch(step).map(torch.from_numpy)
        expected.append(one.update(one.forward_backward(batch, step), step)[:2])
    dist.barrier()
    store.read(folder, run.rank_model.model, run.states | random)  # of the same step, from the other
    again = run.train(5, 8)
    store.write(folder, store.take(run.rank_model.model, run.states | random))
    if dist.get_rank():
        return {}
    other = Step(alone, Decisions(config.train.precision), Mesh(torch.device("cpu")))
    AdapterFiles().read(folder, other.model, other.states() | random)
    state = max(
        float((a - b).abs().max())
        for mine, its in zip(one.optimizer.state.values(), other.optimizer.state.values(), strict=True)
        for a, b in zip(mine.values(), its.values(), strict=True)
    )
    assert ours.keys() == theirs.keys()
    pairs = zip(found + again, expected, strict=True)
    return {
        "apart": max(max(abs(a[0] - b[0]) / b[0], abs(a[1] - b[1]) / b[1]) for a, b in pairs), "state": state,
        "adapters": max(float((ours[name] - theirs[name]).abs().max()) for name in ours),
        "learned": found[0][0] - again[-1][0],
    }  # fmt: skip


def task_noise(case: dict[str, Any], folder: Path) -> list[list[float]]:
    """Squared norms of the gradients of the first sequences of all replicas, as seen and of the same rows alone."""
    run = Run(config_of(case))
    found = run.train(0, 4)
    config = run.config
    torch.manual_seed(config.train.seed)
    model, batches = Transformer(config.model), batches_of(config)
    optimizer, squares = build_optimizer(model, config.optimizer), []
    rows = [
        replica * run.step.share + row for replica in range(run.ranks.layout.dp)
        for row in range(first_part(config, run.ranks.layout) * run.step.micro_batch)
    ]  # fmt: skip
    for step in range(4):
        batch = batches.batch(step).map(torch.from_numpy)
        model(batch.inputs[rows], batch.targets[rows]).backward()
        squares.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) ** 2)
        optimizer.zero_grad()
        model(batch.inputs, batch.targets).backward()
        set_learning_rate(optimizer, learning_rate(config, step))
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip))
        optimizer.step()
        optimizer.zero_grad()
        assert abs(norm - found[step][1]) < 1e-4 * norm  # the whole gradient is what it would be
    return [[seen, expected] for seen, expected in zip(run.small_squares, squares, strict=True) if seen is not None]


def task_reshard(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, save, and hand the checkpoint from layout to layout, each writing it anew; then to one process.

    Returns the largest difference between the first and the last checkpoint and the losses after each hand-over.
    """
    torch.manual_seed(0)
    group = dist.new_group(backend="gloo")
    store, losses, folders = ShardedFiles(group), [], []
    for hop, layout in enumerate(case["layouts"]):
        config = config_of(case | {"layout": layout})
        run = Run(config)
        states = run.states
        if hop == 0:
            run.train(0, 4)
        else:
            store.read(folders[-1], run.rank_model.model, states)
        # As in a run: copied between two steps, written behind the next ones.
        checkpointer = Checkpointer(
            folder / f"hop{hop}", CheckpointConfig(), config.model, store=store, ranks=replace(run.ranks, writing=group)
        )
        checkpointer.take(4, 0, run.rank_model.model, states)
        checkpointer.write()
        losses.append(run.train(4, 6)[-1][0])
        checkpointer.finish()
        folders.append(folder / f"hop{hop}" / name_of(4))
    differences: dict[str, float] = {}
    if dist.get_rank() == 0:
        config = config_of(case | {"layout": {}})
        whole = [read_alone(config, path) for path in folders]
        assert whole[0].keys() == whole[-1].keys()
        assert len(whole[0]) > 40
        for tensors in whole[1:]:
            for name, tensor in tensors.items():
                different = float((tensor - whole[0][name]).abs().max())
                differences[name] = max(differences.get(name, 0.0), different)
    last = checkpointer.last.step if checkpointer.last else None
    return {"difference": max(differences.values(), default=0.0), "losses": losses, "last": last}


def task_first_weights(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Weights of a Hugging Face model read into this rank's parts: the most bytes held, those of the parts, of the
    largest tensor and of the model; and the largest difference from the model's own."""
    from ironlaw.model.huggingface.weights import write_model
    from ironlaw.observe.profile import recording

    config = config_of(case)
    torch.manual_seed(5)
    model = Transformer(config.model)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    if dist.get_rank() == 0:
        write_model(folder, config.model, weights)
    dist.barrier()
    ranks = world.create_mesh(world.check(config, dist.get_world_size()))
    with recording() as recorded:
        rank_model = layouts.apply(build_on_meta(config.model), config, ranks, initialize=False)
        read_first_weights(str(folder), rank_model.transformers.values(), rank_model.model, ShardedFiles())
    sizes = [p.numel() * 4 for p in weights.values()]
    different = 0.0
    for name, parameter in rank_model.model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        rows: Tensor = weights.get(name, weights["embedding.weight"])
        if ".qkv." in name and name not in weights:
            split = [config.model.query_size, config.model.key_value_size, config.model.key_value_size]
            part = name.split(".")[-2]
            rows = weights[name.replace(f".{part}.", ".")].split(split)[("query", "key", "value").index(part)]
        different = max(different, float((whole - rows).detach().abs().max()))
    local = [p.to_local() if hasattr(p, "to_local") else p for p in rank_model.parameters()]
    held = {"peak": recorded.peak_bytes(), "parts": sum(p.numel() * 4 for p in local)}
    held["file"] = (folder / "model.safetensors").stat().st_size
    return held | {"largest": max(sizes), "whole": sum(sizes), "different": different}


def task_traffic(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Collectives of the third step, and the planned ones of this rank's stages."""
    run = Run(config_of(case))
    run.train(0, 2)  # DDP settles its buckets, a pipeline its shapes
    with counted(run.ranks) as found:
        run.train(2, 3)
    layout = run.ranks.layout
    asked = run.config.model, layout, batch_of(run.config), planned_recipe(run.config)
    planned = collectives(*asked, run.ranks.index("pp"))

    def plain(table: Any) -> dict[str, list[int]]:
        return {" ".join(key): [sent.count, sent.bytes] for key, sent in table.items()}

    return {"found": plain(found.table), "planned": plain(table_of(planned, aliases_of(*asked)))}


def task_resume(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Six steps with a checkpoint after the fourth, and the last two again from it: losses and weights of both."""
    config = config_of(case)
    store = ShardedFiles(dist.new_group(backend="gloo"))
    first, results = Run(config), []
    first.train(0, case.get("saved", 4))
    store_at(store, folder, first)
    for run in (first, Run(config)):
        if run is not first:
            store.read(folder, run.rank_model.model, run.states)
        losses = run.train(case.get("saved", 4), 9)
        weights = torch.cat([w.flatten() for w in weights_of(run).values()])
        results.append(
            {"losses": losses, "weights": float(weights.double().square().sum()), "some": weights[:9].tolist()}
        )
    return {"straight": results[0], "resumed": results[1]}


def task_compiled(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Losses without and with compiled blocks, what the third step sent, and whether blocks were compiled; the last two
    steps again from a checkpoint. `backend`: another compiler than Inductor, for its speed."""
    compilation.lookup_backend = lambda name: look_up_backend(case.get("backend", name))
    found: dict[str, Any] = {}
    for wanted in ("off", "on"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = Run(config_of(case | {"train": case["train"] | {"compile": wanted}}))
        with observed(run.ranks) as traffic:
            losses = run.train(0, 2)
            clock = StepClock()
            with traffic.counting(clock):
                losses += run.train(2, 3)
            store_at(run.step.store, folder, run)
            losses += run.train(3, 5)
        sent = {" ".join(key): [of.count, of.bytes] for key, of in sorted(traffic.table.items())}
        waited = sum(clock.times.waited_seconds.values())
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found[wanted] = {
            "losses": losses,
            "sent": sent,
            "waited": waited,
            "graphs": graphs,
            "compiled": run.step.compile(),
        }
    again = Run(run.config)
    again.step.store.read(folder, again.rank_model.model, again.states)
    return found | {"again": again.train(3, 5)}


def store_at(store: Any, folder: Path, run: Run) -> None:
    store.write(folder, store.take(run.rank_model.model, run.states))
    dist.barrier()


def task_averaged(case: dict[str, Any], folder: Path) -> dict[str, float]:
    """DiLoCo that meets after every step with a plain outer step of 1, and weights averaged every step by hand."""
    run = Run(config_of(case))
    found = run.train(0, 6)
    other = Run(config_of(case))
    other.step.plugin = None
    expected = []
    for step in range(6):
        expected += other.train(step, step + 1)
        for parameter in other.rank_model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
    ours, theirs = weights_of(run), weights_of(other)
    return {
        "loss": max(abs(a[0] - b[0]) / b[0] for a, b in zip(found, expected, strict=True)),
        "weights": max(float((ours[name] - theirs[name]).abs().max()) for name in ours),
    }


def task_learns(case: dict[str, Any], folder: Path) -> dict[str, float]:
    """Losses beside those with whole gradients at every step, and whether ranks end with one model."""
    run = Run(config_of(case))
    steps = run.config.train.steps
    found = run.train(0, steps)
    expected = Run(config_of(case | {"communication": {}})).train(0, steps)
    some = torch.cat([w.flatten() for w in weights_of(run).values()]).double().square().sum()
    by_rank = [torch.zeros_like(some) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, some)
    return {
        "first": found[0][0], "last": found[-1][0], "expected": expected[-1][0],
        "apart": float((torch.stack(by_rank) - by_rank[0]).abs().max()),
    }  # fmt: skip


def task_memory(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The most bytes of tensors this rank holds in its fourth step, everything allocated since its start counted."""
    from ironlaw.observe.profile import recording
    from ironlaw.plan.memory import peak_memory

    config = config_of(case)
    with ExitStack() as stack:
        with recording() as recorded:
            run = Run(config)
            seen = stack.enter_context(observed(run.ranks))
            seen.synchronous = True
            with seen.counting(StepClock()):
                run.train(0, 3)  # PowerSGD's state is there from its first step on, which is the third at the earliest
                begin = time.time_ns()
                run.train(3, 4)
        persistent = run.step.persistent_bytes()
        with seen.counting(StepClock()), recording() as again:
            run.train(4, 5)
    peak = recorded.peak_bytes(begin)
    inside = persistent + again.peak_bytes()
    layout = run.ranks.layout.filled(config.train.global_batch)
    program = planned_step(config.model, batch_of(config), layout, planned_recipe(config))
    planned = peak_memory(program, run.ranks.index("pp"))
    document = {"found": peak, "inside": inside, "planned": planned.total, "components": planned.components}
    return document | {"where": planned.where}


def task_run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A whole run into `case["out"]` or the case's folder, with a fault on one rank: what each rank made of it.

    {"fault": kind, "rank": 1, "batches": [..]}: the kind is a rise of the loss in nats or "nan", "gradient" (not a
    number), "signal", "sleep" with "seconds" per step, or "hang" until the watcher ends the run.
    """
    config = load_config(Path(case["config"]), [f"{key}={value}" for key, value in case["set"].items()])
    ranks = world.create_mesh(world.check(config, dist.get_world_size()))
    fault, batches, out = case.get("fault"), case.get("batches"), Path(case.get("out", folder / "run"))
    struck = fault is not None and dist.get_rank() == case["rank"]
    seen: dict[str, Any] = {"losses": {}, "left": []}
    gone = threading.Event()

    def leave(code: int) -> None:
        seen["left"].append(code)
        gone.set()

    class Trainer(loop.Trainer):
        def _timed_step(self, *arguments: Any, **named: Any) -> Any:
            number = self.recovery.batch(self.step)
            hit = struck and (batches is None or number in batches)
            plain = self.one_step.forward_backward

            def forward_backward(*inner: Any, **options: Any) -> Tensor:
                if hit and fault == "sleep":
                    time.sleep(case["seconds"])
                while hit and fault == "hang" and not gone.is_set():
                    time.sleep(0.01)  # not in the event, whose file the report would name
                loss = plain(*inner, **options)
                if hit and fault == "gradient":
                    for parameter in self.one_step.model.parameters():
                        gradient = parameter.grad
                        assert gradient is not None
                        (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(float("nan"))
                if hit and fault == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                return loss + float(fault) if hit and fault not in ("sleep", "hang", "gradient", "signal") else loss

            self.one_step.forward_backward = forward_backward  # type: ignore[method-assign]
            times = super()._timed_step(*arguments, **named)
            self.one_step.forward_backward = plain  # type: ignore[method-assign]
            seen["losses"][self.step] = self.train_loss
            seen["slow"] = [
                name for name, layer in self.one_step.model.named_modules()
                if isinstance(layer, torch.nn.Linear) and getattr(layer, "onednn", False) != onednn_available()
            ]  # fmt: skip
            seen["turns"] = [{"event": t["event"], "to_step": t.get("to_step")} for t in self.recovery.decisions]
            return times

    session.Trainer = Trainer  # type: ignore[misc]
    store = dist.PrefixStore(str(folder), dist.distributed_c10d._get_default_store())
    said: list[str] = []
    profile = replace(load_profile(), fp32_products="onednn" if onednn_available() else "default")
    try:
        resume = case.get("resume", False)
        outcome = RankJob(config, ranks, store).train(out, profile, leave, resume=resume, say=said.append)
        seen |= {"step": outcome.step, "interrupted": outcome.interrupted}
    except (UserError, SystemExit) as error:
        seen["stopped"] = str(error)
    dist.barrier()
    return seen | {"said": said, "events": read_lines(out / "events.jsonl"), "run": str(out)}


def task_preflight(case: dict[str, Any], folder: Path) -> str:
    """`case["differs"]` on rank 1: how each rank ends."""
    config = config_of(case)
    ranks, mine = world.create_mesh(world.check(config, dist.get_world_size())), rank_facts(config)
    if dist.get_rank() == 1:
        name, value = case["differs"]
        mine[name] = mine[name] + value if name == "clock_seconds" else value
    try:
        check_equal(ranks, mine)
    except (UserError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "trains"


def read_alone(config: RunConfig, folder: Path) -> dict[str, Tensor]:
    """A checkpoint of many ranks in one process: weights and moments by name."""
    model = Transformer(config.model)
    optimizer = build_optimizer(model, config.optimizer)
    average = WeightAverage(model, config.train.average_decay or 0.5)
    states: dict[str, Any] = {"optimizer": optimizer} | ({"average": average} if config.train.average_decay else {})
    assert ShardedFiles().read(folder, model, states) == []
    held = named_tensors(model, {"optimizer": optimizer, "average": average})
    return {name: tensor.clone() for name, tensor in held}


def _rank(rank: int, size: int, port: int, batches: Any, finished: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo")
    for batch in iter(batches[rank].get, None):
        os.environ.update(batch["environment"])
        for number, case in enumerate(batch["cases"]):
            _one(rank, size, number, case, Path(batch["folder"]))
        if rank == 0:
            finished.put(True)
    dist.destroy_process_group()


def _one(rank: int, size: int, number: int, case: dict[str, Any], folder: Path) -> None:
    here = folder / f"case{number}"
    here.mkdir(exist_ok=True)
    try:
        result = globals()[f"task_{case['task']}"](case, here)
    except Exception:
        print(f"rank {rank}, {case}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)
    by_rank: list[Any] = [None] * size
    dist.all_gather_object(by_rank, result)
    if rank == 0:
        (folder / f"result{number}.json").write_text(json.dumps(by_rank), encoding="utf-8")


def main() -> None:
    """A batch per line of stdin: {"folder": .., "cases": [..], "environment": {..}}; a line on stdout when done."""
    size = int(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = processes.get_context("fork")
    batches, finished = [fork.SimpleQueue() for _ in range(size)], fork.SimpleQueue()
    ranks = processes.start_processes(_rank, (size, port, batches, finished), size, join=False, start_method="fork")
    for line in sys.stdin:
        for queue in batches:
            queue.put(json.loads(line))
        while finished.empty():
            ranks.join(0.1)  # raises when a rank has failed
        finished.get()
        print("done", flush=True)
    for queue in batches:
        queue.put(None)
    while not ranks.join():
        pass


if __name__ == "__main__":
    main()
