"""How the fixtures in `traces/` came to be: `python tests/observe/record_traces.py`.

`cpu_*.json.gz` were recorded on a CPU. `gpu_synthetic.json.gz` was never recorded: no GPU was at hand. It has the
structure that the profiler's exporter documents (categories, correlation, streams), with invented times, and is
good for testing the reader, not for any statement about a GPU.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).parent / "traces"


def record(name: str, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(500, 64), nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 500)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = DataLoader(TensorDataset(torch.randint(0, 500, (32, 33))), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
            **options,
        ) as profiler:
            for (tokens,) in batches:
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                loss.item()
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
        text = path.read_text(encoding="utf-8")
    text = re.sub(r'"[^"]*/(?:site-packages|lib/python[\d.]+)/', '"site-packages/', text)
    text = re.sub(r'"[^"]*record_traces\.py', '"train.py', text)
    document = json.loads(text)
    document = {k: v for k, v in document.items() if k in ("schemaVersion", "deviceProperties", "traceEvents")}
    kept = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    document["traceEvents"] = [e for e in kept if e["cat"] != "python_function" or _user(e["name"])]
    save(name, document)


def _user(name: str) -> bool:
    return name.startswith(("nn.Module", "train.py"))


def save(name: str, document: Any) -> None:
    with gzip.GzipFile(HERE / f"{name}.json.gz", "wb", mtime=0) as file:
        file.write(json.dumps(document).encode())


def synthetic() -> None:
    """Two steps of 10 ms on one device: per step 3 ms forward, 4 ms backward, 2 ms of a collective of which 1 ms is
    hidden behind the backward pass, 0.5 ms copy, 0.5 ms update, 1 ms during which the host waits for data."""
    events: list[dict[str, Any]] = []
    link = 0

    def cpu(name: str, start: float, duration: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> int:
        nonlocal link
        link += 1
        events.append({
            "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration,
            "args": {"External id": link, **args},
        })  # fmt: skip
        return link

    def device(name: str, start: float, duration: float, external: int, stream: int = 7, cat: str = "kernel") -> None:
        events.append({
            "ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": duration,
            "args": {"External id": external, "correlation": external, "stream": stream, "device": 0},
        })  # fmt: skip

    shapes = {"Input Dims": [[4096], [8192, 4096], [4096, 4096]], "Input type": ["c10::BFloat16"] * 3}
    for number in range(2):
        t = 10_000.0 * number
        cpu(f"ProfilerStep#{number}", t, 10_000, "user_annotation")
        cpu("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", t, 1000, "user_annotation")
        copy = cpu("aten::copy_", t + 1000, 100)
        device("Memcpy HtoD (Pageable -> Device)", t + 1000, 500, copy, cat="gpu_memcpy")
        product = cpu("aten::addmm", t + 1100, 50, **shapes, **{"Sequence number": 5})
        device("nvjet_hsh_256x128_64x4_2x1_v_bz_TNT", t + 1500, 3000, product)
        cpu("autograd::engine::evaluate_function: AddmmBackward0", t + 1300, 200, tid=2, **{"Sequence number": 5})
        back = cpu(
            "aten::mm", t + 1350, 50, tid=2, **{"Sequence number": 5, "Input Dims": [[8192, 4096], [4096, 4096]]}
        )
        device("nvjet_hsh_128x256_64x4_1x2_h_bz_NNT", t + 4500, 4000, back)
        reduce = cpu("nccl:all_reduce", t + 1600, 20, "user_annotation", 2, **{"Group size": 8})
        device("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", t + 7500, 2000, reduce, stream=20)
        cpu("Optimizer.step#AdamW.step", t + 1700, 100, "user_annotation")
        update = cpu("aten::_fused_adamw_", t + 1720, 50)
        device("multi_tensor_apply_kernel", t + 9500, 500, update)
        events.append({
            "ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 1, "tid": 1, "ts": t + 1850,
            "dur": 8100, "args": {"correlation": 999},
        })  # fmt: skip
    save("gpu_synthetic", {
        "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}], "traceEvents": events,
    })  # fmt: skip


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    record("cpu_plain")
    record("cpu_shapes_and_stacks", record_shapes=True, with_stack=True, with_modules=True)
    synthetic()
