"""Views of the catalogue and number formats with their sources, of a compression, and of the installation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ironlaw import units
from ironlaw.report.document import Cell, Document, NameList, Print, bad, dim, good

# Ending of a figure's key -> how its value is printed.
_PRINT: tuple[tuple[str, Print], ...] = (
    ("flops_per_second", lambda v: units.rate(v, "FLOP")), ("bytes_per_second", lambda v: units.rate(v, "B")),
    ("bytes", units.bytes_), ("hz", lambda v: units.si(v, "Hz")), ("watts", lambda v: units.si(v, "W")),
    ("per_kwh", lambda v: f"{v:g} kg CO2/kWh"),
)  # fmt: skip
REFERENCE_PARAMETERS = 8e9  # size of the model whose bytes the table of formats gives as an example


def names_view(names: Mapping[str, Sequence[str]]) -> Document:
    view = Document()
    for section, members in names.items():
        view.heading(section.capitalize())
        view.add(NameList(members))
    view.note("ironlaw catalog NAME shows one of them, each figure with its source.")
    return view


def entry_view(entry: Mapping[str, Any]) -> Document:
    """Return one entry of the catalogue, with the source of every figure."""
    view = Document()
    view.title(f"{entry['title']} ({entry['kind']} {entry['name']})")
    view.facts(entry["facts"].items())
    view.table(
        ["figure", "value", "<source"],
        [
            [key.replace("_", " "), Cell(_printed(key, figure["value"]), "strong", figure["value"]),
             dim(figure["source"] + (f". {figure['note']}" if figure["note"] else ""))]
            for key, figure in entry["figures"].items()
        ],
    )  # fmt: skip
    return view


def _printed(key: str, value: float) -> str:
    name = key.split(" ")[0].split(".")[0]
    if "usd" in name:
        return f"${value:,.2f}"
    for ending, show in _PRINT:
        if name.endswith(ending):
            return show(value)
    return f"{value:,g}" if value < 1e6 else units.count(value)


def formats_view(entries: Sequence[Mapping[str, Any]]) -> Document:
    view = Document()
    view.table(
        ["format", "bits", "largest", "smallest", "spacing", "<scale", "8B model", "on", "<trains"],
        [
            [e["name"], f"{e['bits_per_element']:.4g}", f"{e['largest']:.3g}", f"{e['smallest']:.3g}",
             f"{e['spacing']:.3g}", _scale(e), units.bytes_(REFERENCE_PARAMETERS * e["bits_per_element"] / 8),
             str(len(e["multiplied_by"]) or ""), e["trained_by"]]
            for e in entries
        ],
        caption="bits: with the share of block scales. largest, smallest, spacing (from 1 to the next): of one number, "
        "before its scale. on: how many catalogued accelerators multiply it. trains: whose products "
        "train.precision takes on those; emulated where no library has them. ironlaw formats NAME names them, and the "
        "source.",
    )  # fmt: skip
    return view


def format_view(entry: Mapping[str, Any]) -> Document:
    view = Document()
    view.title(f"{entry['name']}: {entry['title']}")
    view.facts((
        ("bits per number, scales included", f"{entry['bits_per_element']:.6g}"),
        ("largest number", f"{entry['largest']:.4g}"), ("smallest above 0", f"{entry['smallest']:.4g}"),
        ("distance from 1 to the next", f"{entry['spacing']:.6g}"), ("scale", _scale(entry) or "none"),
        ("multiplied by", ", ".join(entry["multiplied_by"]) or "no catalogued accelerator; emulated"),
        ("trained by", {"": "nothing: not a precision of products", "emulated": "no library: emulated everywhere"}.get(
            entry["trained_by"], entry["trained_by"])),
        ("source", f"{entry['source']}, {entry['url']}"),
    ))  # fmt: skip
    return view


def _scale(entry: Mapping[str, Any]) -> str:
    if not entry["scale"]:
        return ""
    rows, columns = entry["block"]
    if not columns:
        return f"{entry['scale']} per {'row' if rows else 'tensor'}"
    return f"{entry['scale']} per {columns}" if rows == 1 else f"{entry['scale']} per {rows} x {columns}"


def compression_view(source: str, out: str, found: Mapping[str, Any]) -> Document:
    """Return what a compression saved and what it cost."""
    view = Document()
    rows = [
        [name, units.bytes_(found[f"bytes_{when}"]), f"{found[f'loss_{when}']:.4f}",
         f"{found[f'tokens_per_second_{when}']:.1f}"]
        for name, when in ((source, "before"), (out, "after"))
    ]  # fmt: skip
    rows.append([
        "change", f"{found['bytes_before'] / found['bytes_after']:.2f} times smaller",
        f"{found['loss_after'] - found['loss_before']:+.4f}",
        f"{found['tokens_per_second_after'] / found['tokens_per_second_before']:.2f} times",
    ])  # fmt: skip
    share = found["compressed_weights"] / found["weights"]
    view.table(
        ["", "weights", "loss, nats per token", "tokens per second here"], rows,
        caption=f"{_formats(found)} by {found['method']}: {share:.0%} of the weights, the others in "
        f"{found['precision_before']}. Loss of {found['held_out_tokens']:,} held-out tokens, in fp32 arithmetic. "
        f"{_decoding(found)}",
    )  # fmt: skip
    return view


def _formats(found: Mapping[str, Any]) -> str:
    if len(found["formats"]) < 2:
        return str(found["to"])
    return ", ".join(f"{name} ({count} layers)" for name, count in found["formats"].items())


def _decoding(found: Mapping[str, Any]) -> str:
    if not found["kernels"]:
        return "No kernel here multiplies this format: weights are dequantised when they are read, the file is smaller."
    kernels = ", ".join(f"{name} ({count} layers)" for name, count in found["kernels"].items())
    return f"Decoded by {kernels}, whose loss is {found['loss_served'] - found['loss_before']:+.4f}."


def checkup_view(found: Mapping[str, Any]) -> Document:
    """Return the findings of `ironlaw doctor`."""
    view = Document()
    view.title(", ".join(f"{name} {version}" for name, version in found["versions"].items() if version))
    for device in found["devices"]:
        more = f"{device['threads']} threads" if "threads" in device else f"capability {device['capability']}"
        view.text(f"{device['device']}: {device['name']} ({more}, {units.bytes_(device['memory_bytes'])})")
    measured = found["measured"]
    if measured is not None:
        when = measured["created"][:16].replace("T", " ")
        view.text(f"Measured {when}: {measured['name']} ({measured['device']})")
    view.heading("Optional parts")
    rows = []
    for extra in found["extras"]:
        have = ", ".join(f"{name} {version}" for name, version in extra["versions"].items() if version)
        missing = ""
        if extra["missing"]:
            missing = f"missing: {', '.join(extra['missing'])}; pip install 'ironlaw[{extra['name']}]'"
        here = Cell("\n".join(filter(None, [have, missing])), "caution" if missing else "good")
        rows.append([extra["name"], here, extra["gives"]])
    view.table(["extra", "<here", "<gives"], rows)
    for problem in found["problems"]:
        view.text(bad("Problem: "), problem)
    for advice in found["advice"]:
        view.text(Cell("Advice: ", "caution"), advice)
    if not found["problems"]:
        view.text(good("Everything that Ironlaw needs is here."))
    return view
