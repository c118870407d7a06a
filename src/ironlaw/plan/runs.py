"""Measured runs from a CSV file, and the assumptions that fill what a row leaves unsaid."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ironlaw.catalog.accelerators import accelerator
from ironlaw.catalog.figures import Figure
from ironlaw.catalog.nodes import Cluster, Node, node
from ironlaw.errors import UserError
from ironlaw.plan.engine import Engine, engine_of_framework
from ironlaw.plan.engine import engine as engine_named
from ironlaw.plan.jobs import RECOMPUTE

FABRIC_WORDS = {"efa": "efa", "roce": "roce", "ethernet": "roce", "ib": "infiniband", "infiniband": "infiniband",
                "hdr": "infiniband", "ndr": "infiniband", "edr": "infiniband"}  # fmt: skip
"""Words of an `interconnect` column, and the kind of network they mean."""

UNSAID_NODE = {"a100-sxm-40gb": "dgx-a100"}
"""Node of a row that does not describe its network, where published runs differ from what is usually rented."""


@dataclass(frozen=True)
class Run:
    """One row: the job as columns of numbers, the setting it ran in, and what was measured."""

    id: str
    group: str
    engine: Engine
    cluster: Cluster
    precision: str
    columns: dict[str, float]
    step_seconds: float | None
    peak_bytes: float | None
    ran: bool
    checks: str
    assumed: tuple[str, ...]
    open_recompute: bool = False  # the row does not say; none is assumed where it fits


def read_runs(path: Path) -> tuple[list[Run], list[tuple[str, str, str]]]:
    """The rows that can be planned, and (id, group, reason) of those that cannot."""
    if not path.is_file():
        raise UserError(f"{path} is not a file: give a CSV of measured runs")
    runs, rejected = [], []
    with path.open(newline="", encoding="utf-8") as stream:
        for number, row in enumerate(csv.DictReader(stream)):
            identity = row.get("id") or f"row {number}"
            try:
                runs.append(_run(identity, row))
            except UserError as error:
                rejected.append((identity, row.get("group") or "", str(error)))
    return runs, rejected


def _number(row: dict[str, str], name: str) -> float | None:
    text = (row.get(name) or "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name} is not a number: '{text}'") from None


def _flag(row: dict[str, str], name: str) -> bool | None:
    text = (row.get(name) or "").strip().lower()
    return None if not text else text in ("true", "1", "1.0", "yes")


def _run(identity: str, row: dict[str, str]) -> Run:
    assumed: list[str] = []
    attention = "flash" if (row.get("attention") or "flash").strip().lower().startswith("flash") else "standard"
    try:
        engine = engine_of_framework(row.get("framework") or "", attention)
    except UserError:
        engine = engine_named("generic")
        assumed.append(f"engine = generic (framework '{row.get('framework') or ''}' is not known)")

    def needed(name: str) -> float:
        value = _number(row, name)
        if value is None:
            raise UserError(f"{name} is not given")
        return value

    def given(name: str, default: float, why: str = "assumed") -> float:
        value = _number(row, name)
        if value is None:
            assumed.append(f"{name} = {default:g} ({why})")
            return default
        return value

    columns = _model(row, needed, given)
    count = needed("accelerators")
    tp, pp, cp = given("tp", 1), given("pp", 1), given("cp", 1)
    if given("ep", 1) > 1:
        raise UserError("expert parallelism is not planned yet")
    dp = given("dp", max(count // (tp * pp * cp), 1), "accelerators / (tp pp cp)")
    if dp * tp * pp * cp != count:
        raise UserError(f"dp {dp:g} x tp {tp:g} x pp {pp:g} x cp {cp:g} is not the {count:g} accelerators of the run")
    sequence_parallel = _flag(row, "sequence_parallel")
    if sequence_parallel is None:
        sequence_parallel = engine.default_sp
    recompute = (row.get("recompute") or "").strip()
    open_recompute = not recompute and engine.default_recompute == "none"
    recompute = recompute or engine.default_recompute
    if recompute not in RECOMPUTE:
        raise UserError(f"recompute '{recompute}' is not none, selective or full")
    micro_batch = needed("micro_batch")
    columns |= {
        "sequence": needed("seq"), "micro_batch": micro_batch, "dp": dp,
        "global_batch": given("global_batch", dp * micro_batch, "one micro-batch"), "tp": tp, "pp": pp, "cp": cp,
        "zero": given("zero", engine.default_zero, "the engine's default"),
        "sp": float(sequence_parallel and tp > 1), "virtual": given("virtual_stages", 1),
        "recompute": float(RECOMPUTE[recompute]), "flash": float(attention == "flash"),
    }  # fmt: skip
    precision = (row.get("precision") or "").strip().lower() or engine.default_precision
    return Run(
        id=identity,
        group=row.get("group") or "",
        engine=engine,
        cluster=_cluster(row, int(count)),
        precision=precision,
        columns=columns,
        step_seconds=_number(row, "step_seconds"),
        peak_bytes=_number(row, "peak_bytes"),
        ran=(row.get("status") or "ok").strip() == "ok",
        checks=row.get("checks") or "",
        assumed=tuple(assumed),
        open_recompute=open_recompute,
    )


def _model(row, needed, given) -> dict[str, float]:  # type: ignore[no-untyped-def]
    hidden, heads = needed("hidden"), needed("heads")
    gated = bool(_flag(row, "gated_ffn"))
    return {
        "layers": needed("layers"), "hidden": hidden, "heads": heads, "kv_heads": given("kv_heads", heads),
        "head_size": hidden / heads, "ffn": given("ffn", 4 * hidden), "gated": float(gated),
        "vocab": needed("vocab"), "tied": float(bool(_flag(row, "tied"))), "biased": float(not gated),
    }  # fmt: skip


_RATE = re.compile(
    r"(?:(?P<count>\d+)\s*x\s*)?(?:[a-z]*\s*)(?P<gbits>\d{2,5})\s*(?:gbps|gb/s|gbit/s|g\b)?", re.IGNORECASE
)


def _cluster(row: dict[str, str], count: int) -> Cluster:
    """The accelerator's usual node, with the size and the network that the row describes."""
    acc = accelerator(row.get("accelerator") or "")
    usual = node(UNSAID_NODE.get(acc.name, acc.default_node))
    per_node = _number(row, "per_node")
    if per_node and int(per_node) != usual.accelerators:
        inside = usual.scale_up_accelerators
        if inside <= usual.accelerators:  # an island that ends at the node, not a rack
            inside = min(inside, int(per_node)) if inside < usual.accelerators else int(per_node)
        usual = replace(usual, accelerators=int(per_node), scale_up_accelerators=inside)
    return Cluster(acc, count, _described(usual, row.get("interconnect") or ""))


def _described(usual: Node, interconnect: str) -> Node:
    """The node with the network of a description such as `8x HDR200 IB per node` or `800 Gb/s IB per node`."""
    for clause in re.split(r"[;+]", interconnect):
        words = re.findall(r"[a-z]+", clause.lower())
        fabric = next((FABRIC_WORDS[word] for word in words if word in FABRIC_WORDS), None)
        rate = _RATE.search(clause)
        if fabric and rate:
            gbits = int(rate["gbits"]) * int(rate["count"] or 1)
            total = Figure(gbits * 1e9 / 8, "the run's own description")
            return replace(usual, fabric=fabric, nics=Figure(1, "sum of all"), nic_bytes_per_second=total)
    return usual
