"""What formats and methods cost the demo's model: `python benchmarks/compressions.py RUN [--budget 200] [--record]`.

RUN is what `ironlaw train examples/gpt-tiny.toml --out RUN` made. Change of the loss of the weights in fp32 arithmetic,
of the same by the kernels that decode, bytes, and tokens per second of one sequence beside the model's as it is. What
has been run is kept in benchmarks/results/compressions.jsonl and not run again: call it until nothing is left.
`--record` writes benchmarks/results/compressions.md from what there is.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from ironlaw.catalog.formats import read_target
from ironlaw.cli.compress import engine_decoder
from ironlaw.train.compression import measure_compression, open_source

RESULTS = Path(__file__).resolve().parent / "results" / "compressions.jsonl"
CASES: list[tuple[str, str, str, int | None]] = [  # format, method, score of pruning, bytes for mixed formats
    *((to, "rtn", "magnitude", None) for to in ("int8", "int4", "nf4", "fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4")),
    ("int8", "smoothquant", "magnitude", None),
    *(("int4", method, "magnitude", None) for method in ("gptq", "awq", "smoothquant", "hqq")),
    ("mxfp4", "rtn", "magnitude", 6_250_000), ("mxfp4", "gptq", "magnitude", None), ("nf4", "hqq", "magnitude", None),
    ("pruned=50%", "rtn", "magnitude", None), ("pruned=50%", "rtn", "wanda", None),
    ("2:4", "rtn", "magnitude", None), ("2:4", "rtn", "wanda", None),
    ("int4,2:4", "gptq", "wanda", None),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which no other begins")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    there = {(row["to"], row["method"], row["score"], row["within"]) for row in rows}
    left, began = [case for case in CASES if case not in there], time.monotonic()
    if left and options.run is not None:
        source = open_source(options.run, None, print, lambda model: None)
        before = engine_decoder(source.copy(), {})
        while left and time.monotonic() - began < options.budget:
            to, method, score, within = left.pop(0)
            made = measure_compression(source, read_target(to), before, engine_decoder, method, score, within=within)[0]  # type: ignore[arg-type]
            rows.append(asdict(made) | {"score": score, "within": within})
            with RESULTS.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(to, method, score, f"{made.loss_after - made.loss_before:+.4f}", flush=True)
    print(f"{len(left)} are left")
    if options.record:
        RESULTS.with_suffix(".md").write_text(page(rows))


def page(rows: list[dict[str, object]]) -> str:
    lines = [
        "# What formats and methods cost the demo's model", "",
        f"`python benchmarks/compressions.py RUN` of `examples/gpt-tiny.toml` ({rows[0]['loss_before']:.4f} nats per",
        f"token as it is, {rows[0]['held_out_tokens']:,} held-out tokens). Speed of one sequence beside the model's in",
        "fp32, in turns; measured on a shared machine. Empty: no kernel here multiplies the format.", "",
        "| to | method | change of the loss | by the kernels that decode | MB | speed |",
        "|---|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in rows:
        base, served = float(str(row["loss_before"])), row["loss_served"]
        gaps = [f"{float(str(loss)) - base:+.4f}" if loss is not None else "" for loss in (row["loss_after"], served)]
        method = str(row["method"]) + (", wanda" if row["score"] == "wanda" else "")
        method += f", within {row['within']:,} bytes" if row["within"] else ""
        speed = float(str(row["tokens_per_second_after"])) / float(str(row["tokens_per_second_before"]))
        kept = f"{speed:.2f}" if row["kernels"] else ""
        lines.append(
            f"| {row['to']} | {method} | {gaps[0]} | {gaps[1]} | {int(str(row['bytes_after'])) / 1e6:.2f} | {kept} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
