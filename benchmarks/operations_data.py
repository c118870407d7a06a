"""Reads the calibration tables that `fit_operations.py` learns from, and the nominal figures beside them."""

from __future__ import annotations

import csv
import gzip
import io
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

Rows = list[dict[str, str]]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reference:
    """Nominal figures of an accelerator: dense peaks in TFLOP/s, memory in GB/s, and its island link."""

    generation: str
    tflops: dict[str, float]
    memory_gb_per_second: float
    compute_units: int
    power_watts: float
    link_gb_per_second: float  # per accelerator, one direction
    topology: str = "switch"

    def toml(self) -> dict[str, object]:
        """As the arguments of `Hardware`."""
        return {
            "peak_flops_per_second": {k: v * 1e12 for k, v in self.tflops.items()},
            "memory_bytes_per_second": self.memory_gb_per_second * 1e9,
            "compute_units": self.compute_units,
            "power_watts": self.power_watts,
        }


def _peaks(bf16: float, fp8: float = 0.0, nvfp4: float = 0.0) -> dict[str, float]:
    return {k: v for k, v in {"bf16": bf16, "fp8": fp8, "nvfp4": nvfp4}.items() if v}


# Dense peaks: NVIDIA datasheets; Blackwell as NVIDIA states for MFU (dgxc-benchmarking README); units: XLA
# device descriptions and datasheets; power: module limits (HGX B300 1,100 W).
REFERENCES = {
    "V100-PCIE-16GB": Reference("volta", _peaks(112), 900, 80, 250, 16, "bus"),
    "A100-SXM-80GB": Reference("ampere", _peaks(312), 2039, 108, 400, 300),
    "A40": Reference("ampere_graphics", _peaks(149.7), 696, 84, 300, 32, "bus"),
    "L40S": Reference("ada", _peaks(362, 733), 864, 142, 350, 32, "bus"),
    "H100-SXM-80GB": Reference("hopper", _peaks(989.4, 1978.8), 3350, 132, 700, 450),
    "H200-SXM-141GB": Reference("hopper", _peaks(989.4, 1978.8), 4800, 132, 700, 450),
    "B200-SXM": Reference("blackwell", _peaks(2250, 4500, 9000), 8000, 148, 1000, 900),
    "GB200": Reference("blackwell", _peaks(2450, 4900, 9800), 8000, 152, 1200, 900),
    "B300-SXM": Reference("blackwell_ultra", _peaks(2250, 4500, 13500), 8000, 148, 1100, 900),
    "GB300": Reference("blackwell_ultra", _peaks(2450, 4900, 14700), 8000, 152, 1400, 900),
    "RTX PRO 6000 Server": Reference("blackwell_graphics", _peaks(503.8, 1007.6, 2015.2), 1597, 188, 600, 64, "bus"),
    "Intel Arc Pro B60": Reference("xe2", _peaks(98.3, 98.3), 456, 20, 200, 32, "bus"),
    "MI300X": Reference("cdna3", _peaks(1307.4, 2614.9), 5300, 304, 750, 448, "mesh"),
}
DTYPES = {"bfloat16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
COLLECTIVES = {"alltoall": "all_to_all"}
NETWORKS = {
    # network: (words in the interconnect column, nominal GB/s per accelerator and direction)
    "efa_v2": (("EFA v2",), 50.0),
    "efa_v4": (("EFA v4",), 50.0),
    "efa_playbook": (("EFA (HF",), 50.0),
    "efa_v1": (("EFA v1",), 6.25),
    "roce": (("AINIC", "RDMA port", "Broadcom", "RoCE (OCI"), 50.0),
    "roce_rocm6": (("mlx5 RoCE",), 50.0),
    "infiniband": (("InfiniBand NDR", "8x400Gb IB", "2x NVL72"), 50.0),
    "tcpx": (("a3-mega",), 25.0),
}
NOT_PLANNED = (
    "efa_playbook",
    "roce_rocm6",
)  # measured once each, on clusters that no fabric of a catalogued node names
NETWORK_RATE = {("roce", "B300-SXM"): 100.0}
"""Nominal GB/s per accelerator where a node has faster cards than the rest of its group."""


def read(path: Path) -> Rows:
    """Rows of a CSV file, gzipped or not."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return list(csv.DictReader(io.StringIO(raw.decode("utf-8"))))


@dataclass
class Table:
    """Columns of one group of rows that share constants."""

    name: str
    columns: dict[str, Array]
    seconds: Array
    accelerator: list[str]
    source: list[str]
    shape: list[tuple[float, ...]] = field(default_factory=list)

    def pick(self, mask: npt.NDArray[np.bool_]) -> Table:
        """The rows where mask is true."""
        keep = np.flatnonzero(mask)
        return Table(
            self.name,
            {k: v[keep] for k, v in self.columns.items()},
            self.seconds[keep],
            [self.accelerator[i] for i in keep],
            [self.source[i] for i in keep],
            [self.shape[i] for i in keep],
        )

    def where(self, accelerator: str | None = None, source: str | None = None) -> Table:
        """The rows of one accelerator and of sources that contain a word."""
        keep = [
            (accelerator is None or a == accelerator) and (source is None or source in s)
            for a, s in zip(self.accelerator, self.source, strict=True)
        ]
        return self.pick(np.array(keep, dtype=bool))

    def held_out(self, share: float = 0.4, seed: int = 0) -> npt.NDArray[np.bool_]:
        """True for rows whose shape is held out; every row of a shape, in all sources, goes one way."""
        shapes = sorted(set(self.shape))
        chosen = np.random.default_rng(seed).random(len(shapes)) < share
        table = dict(zip(shapes, chosen, strict=True))
        return np.array([table[s] for s in self.shape], dtype=bool)


def _table(name: str, rows: list[tuple[dict[str, float], float, str, str]]) -> Table:
    keys = list(rows[0][0])
    return Table(
        name,
        {k: np.array([r[0][k] for r in rows]) for k in keys},
        np.array([r[1] for r in rows]),
        [r[2] for r in rows],
        [r[3] for r in rows],
        [tuple(r[0].values()) for r in rows],
    )


def matmul_tables(folder: Path) -> dict[tuple[str, str], Table]:
    """(generation, dtype or dtype/library) to its rows. Half precision is the same in all libraries."""
    groups: dict[tuple[str, str], list] = defaultdict(list)
    for row in read(folder / "gemm.csv.gz"):
        dtype = DTYPES[row["dtype"]]
        library = row["framework"].split()[0]
        key = dtype if dtype == "bf16" else f"{dtype}/{library}"
        shape = {k: float(row[k]) for k in ("m", "n", "k")}
        generation = REFERENCES[row["accelerator"]].generation
        groups[generation, key].append((shape, float(row["time_ms"]) / 1e3, row["accelerator"], row["source"]))
    return {key: _table("/".join(key), rows) for key, rows in sorted(groups.items())}


def attention_tables(folder: Path) -> tuple[dict[tuple[str, str], Table], int]:
    """(generation, kernel) to its rows, and how many rows above the peak were left out."""
    groups: dict[tuple[str, str], list] = defaultdict(list)
    dropped = 0
    for row in read(folder / "attention_forward.csv.gz"):
        reference = REFERENCES[row["accelerator"]]
        if float(row["causal_tflops"]) > reference.tflops["bf16"]:
            dropped += 1
            continue
        kernel = {"torch_flow": "trtllm", "vllm_flash_attn": "flash_attention"}.get(row["kernel"], row["kernel"])
        names = {
            "batch": "batch",
            "seq": "sequence",
            "heads": "heads",
            "kv_heads": "kv_heads",
            "head_dim": "head_size",
        }
        shape = {new: float(row[old]) for old, new in names.items()}
        source = f"{row['framework']} {row['source']}"
        groups[reference.generation, kernel].append((shape, float(row["time_ms"]) / 1e3, row["accelerator"], source))
    return {key: _table("/".join(key), rows) for key, rows in sorted(groups.items())}, dropped


def collective_rows(folder: Path) -> tuple[Table, Table, dict[str, int]]:
    """Rows inside one island, rows between islands (column `network` is an index), and what was left out."""
    inside, between = [], []
    left: dict[str, int] = defaultdict(int)
    for row in read(folder / "collectives.csv.gz"):
        kind = COLLECTIVES.get(row["collective"], row["collective"])
        accelerator = row["accelerator"].rstrip("?").replace("MI325X", "MI300X").replace("MI355X", "MI300X")
        size = float(row["size_bytes"] or 0)
        if accelerator not in REFERENCES or not size or not row["n_gpus"] or "->" in kind:
            left["no accelerator, size or ranks stated"] += 1
            continue
        n = float(row["n_gpus"])
        seconds = float(row["time_us"] or 0) * 1e-6
        bus = float(row["busbw_GBps"] or 0) * 1e9
        share = {"all_reduce": 2 * (n - 1) / n, "send_recv": 1.0}.get(kind, (n - 1) / n)
        if not seconds and bus:
            seconds = share * size / bus
        if not seconds:
            left["no time"] += 1
            continue
        values = {"kind": float(KIND_INDEX[kind]), "size": size, "ranks": n}
        source = f"{row['library']} {row['source']}"
        if row["n_nodes"] == "1" or (accelerator == "GB200" and n <= 72):
            inside.append((values, seconds, accelerator, source))
            continue
        names = [name for name, (words, _) in NETWORKS.items() if any(w in row["interconnect"] for w in words)]
        if "EKS" in row["source"]:
            left["network libraries of 2023, twice as slow as the same machines later"] += 1
            continue
        if not names:
            left["network not stated, or slower than a cluster's"] += 1
            continue
        values["island"] = 72.0 if "NVL72" in row["interconnect"] else min(float(row["gpus_per_node"]), n)
        between.append((values, seconds, accelerator, f"{names[0]} | {source}"))
    return _table("island", inside), _table("network", between), dict(left)


KIND_INDEX = {k: i for i, k in enumerate(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"))}


def streaming_rows(folder: Path) -> tuple[Table, int]:
    """Kernels of known size that do not fit the L2 cache, and how many rows were left out."""
    rows, left = [], 0
    kinds = {"rms_norm": "norm", "residual_add": "elementwise", "silu_and_mul": "gated_activation"}
    for row in read(folder / "memory_bandwidth.csv"):
        accelerator, kind = row["accelerator"], kinds.get(row["op"].split()[0])
        cached = "L2" in row["notes"]
        if accelerator not in REFERENCES or kind is None or cached or not row["time_ms"]:
            left += 1
            continue
        values = {"kind": float(STREAM_INDEX[kind]), "size": float(row["bytes_moved"])}
        rows.append((values, float(row["time_ms"]) / 1e3, accelerator, row["source"]))
    return _table("streaming", rows), left


STREAM_INDEX = {k: i for i, k in enumerate(("elementwise", "norm", "gated_activation"))}
