"""How the fixtures in `traces/` came to be: `python tests/observe/record_traces.py`.

`cpu_*.json.gz` were recorded on a CPU. `gpu_*.json.gz` were never recorded: no GPU was at hand. They have the structure
that the profiler's exporter documents (categories, correlation, streams), with invented times, and are good for testing
the reader, not for any statement about a GPU. The reader was also tried on recorded traces that others have published;
those are not part of this repository.
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


UPDATE = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>>(int)"


class Made:
    """Events of one invented process: operations of the host's threads, driver calls, kernels. Times in us."""

    def __init__(self, device: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.header = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": device}]}
        self._external, self._correlation = 0, 100_000

    def host(self, name: str, start: float, duration: float, tid: int = 1, cat: str = "cpu_op", **args: Any) -> None:
        self._external += 1
        self._add(cat, name, 1, tid, start, duration, {"External id": self._external, **args})

    def launch(
        self, kernel: str, call: float, start: float, duration: float, tid: int = 1, stream: int = 7,
        cat: str = "kernel", runtime: str = "cudaLaunchKernel",
    ) -> None:  # fmt: skip
        """The driver's call and what it starts: linked by the correlation alone, as in traces of older releases."""
        self._correlation += 1
        link = {"External id": self._correlation, "correlation": self._correlation}
        self._add("cuda_runtime", runtime, 1, tid, call, 5, link)
        self._add(cat, kernel, 0, stream, start, duration, link | {"stream": stream, "device": 0})

    def _add(self, cat: str, name: str, pid: int, tid: int, start: float, duration: float, args: Any) -> None:
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration,
                            "args": args})  # fmt: skip

    def save(self, name: str, **header: Any) -> None:
        save(name, self.header | header | {"traceEvents": self.events})


def eager() -> None:
    """Launch-bound: 100 kernels of 20 us forward and 100 backward, each launched 50 us after the one before it; the
    update 100 of 5 us; a loss read by `.item()`. A step of 16 ms in which the device works 4.5."""
    made, types = Made("NVIDIA A100-SXM4-80GB"), {"Input type": ["float"] * 2}
    for number in range(3):
        t = 16_000.0 * number
        made.host(f"ProfilerStep#{number}", t, 16_000, cat="user_annotation")
        for i in range(100):
            at = t + 50 * i
            made.host("aten::mm", at, 40, **{"Input Dims": [[512, 256], [256, 256]], "Sequence number": i}, **types)
            made.launch("ampere_sgemm_128x64_nn", at + 10, at + 20, 20)
        for i in range(100):  # by the autograd engine's own thread
            at = t + 5000 + 50 * i
            made.host("autograd::engine::evaluate_function: MmBackward0", at, 48, 2, **{"Sequence number": 99 - i})
            made.host("aten::mm", at + 5, 40, 2, **{"Input Dims": [[256, 512], [512, 256]]}, **types)
            made.launch("ampere_sgemm_64x64_nt", at + 10, at + 20, 20, tid=2)
        made.host("Optimizer.step#AdamW.step", t + 10_000, 5000, cat="user_annotation")
        for i in range(100):
            at = t + 10_000 + 50 * i
            made.host("aten::addcdiv_", at, 40)
            made.launch("void at::native::vectorized_elementwise_kernel<4, ...>", at + 10, at + 20, 5)
        made.host("train.py(41): <module>", t + 15_100, 800, cat="python_function")
        made.host("aten::item", t + 15_200, 600)
        made.host("aten::_local_scalar_dense", t + 15_210, 580)
        made.launch("Memcpy DtoH (Device -> Pageable)", t + 15_220, t + 15_230, 2, cat="gpu_memcpy",
                    runtime="cudaMemcpyAsync")  # fmt: skip
    made.save("gpu_eager")


def compiled() -> None:
    """Compiled regions: triton kernels and library products, 6 ms forward, 10 ms backward, 1 ms update; no gaps."""
    made = Made("NVIDIA H100 80GB HBM3")
    for number in range(3):
        t = 17_000.0 * number
        made.host(f"ProfilerStep#{number}", t, 17_000, cat="user_annotation")
        made.host("Torch-Compiled Region: 0/0", t, 900)
        made.host("CompiledFunction", t + 10, 880, **{"Sequence number": 7})
        made.host("aten::_scaled_dot_product_flash_attention", t + 30, 50)
        made.launch("void pytorch_flash::flash_fwd_kernel<...>(pytorch_flash::Flash_fwd_params)", t + 40, t, 2000)
        made.host("triton_poi_fused_gelu_3", t + 100, 20)
        made.launch("triton_poi_fused_gelu_3", t + 105, t + 2000, 1000, runtime="cuLaunchKernel")
        made.host("extern_kernels.mm", t + 200, 30)
        made.host("aten::mm", t + 205, 25)
        made.launch("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", t + 210, t + 3000, 3000)
        made.host("autograd::engine::evaluate_function: CompiledFunctionBackward", t + 1000, 900, 2,
                  **{"Sequence number": 7})  # fmt: skip
        made.host("CompiledFunctionBackward", t + 1010, 880, 2)
        made.host("aten::mm", t + 1100, 30, 2)
        made.launch("nvjet_tst_128x128_64x5_1x2_h_bz_NNT", t + 1105, t + 6000, 8000, tid=2)
        made.launch("triton_red_fused_native_layer_norm_backward_5", t + 1205, t + 14_000, 2000, tid=2,
                    runtime="cuLaunchKernel")  # fmt: skip
        made.host("Optimizer.step#AdamW.step", t + 2000, 200, cat="user_annotation")
        made.host("aten::_fused_adamw_", t + 2010, 150)
        made.launch(
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", t + 2020, t + 16_000, 1000
        )
    made.save("gpu_compiled")


def ddp() -> None:
    """Rank 2 of 4: 4 ms forward, 6 ms backward beside two all-reduces of 5 ms each on a stream of their own, of which
    4 ms outlast it; 1 ms update. Step 15 ms."""
    made = Made("NVIDIA A100-SXM4-80GB")
    for number in range(3):
        t = 15_000.0 * number
        made.host(f"ProfilerStep#{number}", t, 15_000, cat="user_annotation")
        made.host("DistributedDataParallel.forward", t + 5, 500, cat="user_annotation")
        made.host("aten::addmm", t + 20, 50, **{"Sequence number": 3})
        made.launch("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", t + 30, t, 4000)
        made.host("autograd::engine::evaluate_function: AddmmBackward0", t + 600, 300, 2, **{"Sequence number": 3})
        made.host("aten::mm", t + 610, 50, 2)
        made.launch("ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_nt", t + 620, t + 4000, 6000, tid=2)
        for bucket in range(2):
            made.host("nccl:all_reduce", t + 700 + 50 * bucket, 40, 2, cat="user_annotation")
            made.host("record_param_comms", t + 705 + 50 * bucket, 30, 2, **{"Collective name": "allreduce",
                      "Group size": 4, "In msg nelems": 6_000_000, "dtype": "Float"})  # fmt: skip
            made.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                        t + 710 + 50 * bucket, t + 4000 + 5000 * bucket, 5000, tid=2, stream=20,
                        runtime="cudaLaunchKernelExC")  # fmt: skip
        made.host("Optimizer.step#AdamW.step", t + 1000, 200, cat="user_annotation")
        made.host("aten::_fused_adamw_", t + 1010, 150)
        made.launch(
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", t + 1020, t + 14_000, 1000
        )
    made.save("gpu_ddp", distributedInfo={"backend": "nccl", "rank": 2, "world_size": 4})


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    record("cpu_plain")
    record("cpu_shapes_and_stacks", record_shapes=True, with_stack=True, with_modules=True)
    synthetic()
    eager()
    compiled()
    ddp()
