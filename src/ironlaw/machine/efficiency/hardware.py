"""The inputs of the time models of an accelerator: its nominal figures and the constants of its generation.

Everything is a primitive or a frozen dataclass of primitives, so that a catalogue, a measured profile or
a test can construct it directly. Units are in the names; fractions refer to the nominal figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ironlaw.catalog.formats import number_format
from ironlaw.errors import UserError, did_you_mean

Array = npt.NDArray[np.float64]
Number = float | Array
"""A float or an array; the functions of this package broadcast, and return floats for floats, arrays for arrays."""


@dataclass(frozen=True)
class Evidence:
    """The source of a group of constants, and the spread of measurements around their predictions.

    `log_error_p10` and `log_error_p90` are percentiles of ln(measured / predicted): 80% of the measured
    times lie between `predicted * exp(p10)` and `predicted * exp(p90)`.
    """

    source: str
    rows: int
    log_error_p10: float
    log_error_p90: float
    assumed: bool = False
    note: str = ""


@dataclass(frozen=True)
class MatmulConstants:
    """Constants of the matmul model, defined in `matmul.py`."""

    attainable_fraction: float  # of dense peak, inside an infinitely large tile at full clock
    operand_elements: float  # loading one tile edge element costs as much as this many multiply-adds
    fill_elements: float  # depth of the software pipeline: k elements before the first result
    wave_rigidity: float  # 0: work spreads evenly over compute units (stream-K); 1: whole waves only
    memory_fraction: float  # of nominal memory bandwidth
    split_traffic: float  # cost of adding up split-K partial sums, in passes over fp32 partials
    launch_seconds: float  # shortest time of a kernel inside a graph or a full queue (no host time)
    joules_per_flop: float  # under the power limit: rate = power_watts / joules_per_flop
    throttle_seconds: float  # for a kernel this long in a benchmark loop, half of the power limit's effect applies
    evidence: Evidence | None = None


@dataclass(frozen=True)
class AttentionConstants:
    """Constants of the attention kernel that most training stacks use on one generation (`attention.py`)."""

    attainable_fraction: float  # of dense peak, at infinite head size and length
    softmax_head_elements: float  # exponentials cost as much as this many more head elements
    fill_keys: float  # pipeline start and masked diagonal: wasted keys per query tile
    tail_rigidity: float  # 0: perfect balance over compute units; 1: the longest tile trails alone
    extra_traffic: float  # passes over q, k, v, o beyond one (rotation, layout, cache writes)
    launch_seconds: float
    joules_per_flop: float
    memory_fraction: float
    backward_relative_fraction: float = 0.86  # rate of backward over forward, see attention.py
    kernel: str = ""
    evidence: Evidence | None = None


@dataclass(frozen=True)
class StreamingConstants:
    """Constants of bandwidth-bound kernels (`streaming.py`)."""

    fraction: Mapping[str, float]  # of nominal memory bandwidth, by kind of kernel
    ramp_bytes: float  # size at which half the attainable bandwidth is reached
    launch_seconds: float
    evidence: Evidence | None = None


@dataclass(frozen=True)
class CollectiveConstants:
    """Constants of collectives inside one island: NVLink, xGMI or PCIe domain (`collectives.py`)."""

    launch_seconds: float
    step_seconds: float  # latency of one hop
    fill_seconds: float  # growth of the start-up with size, per factor e beyond fill_bytes
    fill_bytes: float
    ring_fraction: float  # of the nominal one-direction link bandwidth of a rank
    local_copy_ratio: float  # bandwidth of copying one's own share, over the attained ring bandwidth
    switch_fraction: float = 0.0  # same, for reduction inside the switch (NVLS); 0: there is none
    direct_fraction: float = 0.0  # same, for all-to-all and send/recv; 0: the ring's fraction
    sharing_exponent: float = 0.0  # a bus shared by n ranks: bandwidth x (2/n)^exponent
    wide_switch_fraction: float = 0.0  # `switch_fraction` for more than 8 ranks; 0: not measured, as for 8
    evidence: Evidence | None = None


@dataclass(frozen=True)
class NetworkConstants:
    """Constants of one kind of network between islands."""

    launch_seconds: float
    step_seconds: float  # latency of one hop between islands
    fill_seconds: float
    fill_bytes: float
    attained_fraction: float  # of the nominal one-direction NIC bandwidth
    evidence: Evidence | None = None


@dataclass(frozen=True)
class Efficiency:
    """All constants of one accelerator generation, stored in `constants/<generation>.toml`."""

    generation: str
    matmul: Mapping[str, MatmulConstants]  # by dtype, or dtype/library where libraries differ
    attention: AttentionConstants
    streaming: StreamingConstants
    collectives: CollectiveConstants | None
    default_library: Mapping[str, str] = field(default_factory=dict)

    def matmul_for(self, dtype: str, library: str | None = None) -> MatmulConstants:
        """Return the constants for a format; without measurements, those of a format with the same kernels.

        Energy is proportional to the operands' bytes: Transformer Engine's products on a B300 draw 1, 0.52 and 0.29
        times as much in bf16, fp8 and nvfp4 (docs/notes/operations.md).
        """
        key = self.kernels(dtype, library)
        found, name = self.matmul[key], key.partition("/")[0]
        share = number_format(dtype).bytes_per_element() / number_format(name).bytes_per_element()
        return found if share >= 1 else replace(found, joules_per_flop=share * found.joules_per_flop)

    def kernels(self, dtype: str, library: str | None = None) -> str:
        """Return the key of a format's products in `matmul`: FORMAT/LIBRARY, or FORMAT if one library was measured."""
        name = self._measured(dtype)
        library = library or self.default_library.get(name)
        for key in (f"{name}/{library}", name):
            if key in self.matmul:
                return key
        raise UserError(f"no matmul constants for {dtype} on {self.generation}; {did_you_mean(dtype, self.matmul)}")

    def _measured(self, dtype: str) -> str:
        """Return the format itself if its kernels were measured, else the nearest measured substitute."""
        stands_in = number_format(dtype).kernels_of
        if any(key.split("/")[0] == dtype for key in self.matmul) or not stands_in:
            return dtype
        return self._measured(stands_in)

    def libraries(self, dtype: str) -> tuple[str, ...]:
        """Return the libraries whose kernels for a format were measured separately."""
        name = self._measured(dtype)
        return tuple(key.split("/")[1] for key in self.matmul if key.startswith(f"{name}/"))

    def assumptions(self) -> tuple[str, ...]:
        """Return the groups of constants that are assumed instead of measured, each with its note."""
        groups = [(f"matmul {key}", value.evidence) for key, value in self.matmul.items()]
        groups += [(f"attention {self.attention.kernel}", self.attention.evidence)]
        groups += [("streaming", self.streaming.evidence)]
        groups += [("collectives", self.collectives.evidence if self.collectives else None)]
        return tuple(f"{name}: {e.note or e.source}" for name, e in groups if e is not None and e.assumed)


@dataclass(frozen=True)
class Hardware:
    """One accelerator: nominal figures from its datasheet, and the efficiency of its generation."""

    name: str
    peak_flops_per_second: Mapping[str, float]  # dense, by dtype
    memory_bytes_per_second: float
    compute_units: int  # SMs, CUs, Xe cores, matrix units
    power_watts: float  # power limit of the board
    efficiency: Efficiency

    def peak(self, dtype: str) -> float:
        """Return the dense peak of a format in FLOP/s; a block-scaled format has that of its plain format."""
        wanted = number_format(dtype)
        for name in (dtype, wanted.peak, wanted.rate_of):
            if name in self.peak_flops_per_second:
                return self.peak_flops_per_second[name]
        raise UserError(f"{self.name} has no peak for {dtype}; {did_you_mean(dtype, self.peak_flops_per_second)}")


@dataclass(frozen=True)
class Fabric:
    """The links between ranks: islands (NVLink, xGMI, PCIe domain) joined by a network."""

    island_ranks: int
    island_bytes_per_second: float  # nominal, per rank, one direction, all links together
    island: CollectiveConstants
    topology: str = "switch"  # switch: any pair at full rate; mesh: a link per pair; bus: shared
    network_bytes_per_second: float = 0.0  # nominal, per rank, one direction: the node's NICs / its ranks
    network: NetworkConstants | None = None
    oversubscription: float = 1.0  # of the network's upper level, >= 1


def broadcast(*values: Number) -> list[Array]:
    """Return the arguments as float arrays of one shape, zero-dimensional if all of them are numbers."""
    return [np.asarray(a, dtype=np.float64) for a in np.broadcast_arrays(*values)]


def unwrap(result: Array) -> Number:
    """Return a zero-dimensional array as a float, other arrays unchanged."""
    return result if result.ndim else float(result)
