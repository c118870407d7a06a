"""`ironlaw compress`: a trained model into one in fewer bits, with what that costs and what it saves.

Loss is the mean over held-out text in fp32 arithmetic, as the run's own validation computes it; speed is that of
`ironlaw generate`, one sequence at a time, both models in turns: by the kernels of `numerics/quantized_linear.py`.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ironlaw.catalog.formats import CompressionTarget, Method, NumberFormat, Score
from ironlaw.config import RunConfig, build_config, load_config
from ironlaw.data.dataset import Dataset
from ironlaw.data.loader import Loader
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError
from ironlaw.files import write_json
from ironlaw.ledger import Estimate, Ledger, MemoryLine, Origin
from ironlaw.model.huggingface.weights import stored_type
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.compression import check_method, compress, mixed_formats
from ironlaw.numerics.quantized import Quantized
from ironlaw.train import checkpoint as disk
from ironlaw.train.objective import CrossEntropy
from ironlaw.train.quantized_store import QuantizedFiles
from ironlaw.train.restore import check_first_weights, load_first_weights
from ironlaw.train.run_directory import RunDirectory, complete_or_nothing, create_run

CALIBRATION_SEQUENCES = 128  # of the training text: the number of the GPTQ paper
LONGEST_SEQUENCE = 2048  # of a Hugging Face model's text, whose context may be more than attention can be paid for
DECODED_TOKENS, ROUNDS = 24, 5  # of each timing, and timings of each model

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Compressed:
    """Before and after. Loss in nats per token, bytes of all weights, tokens per second of one sequence.

    loss_after:   of the weights, in fp32 arithmetic.
    loss_served:  of the same weights by the kernels that decode, which may round inputs too; None where no kernel
                  has the format, and decoding is as before.
    """

    to: str
    method: str
    loss_before: float
    loss_after: float
    loss_served: float | None
    bytes_before: int
    bytes_after: int
    tokens_per_second_before: float
    tokens_per_second_after: float
    bytes_read: int  # of weights for each token decoded, after
    kernels: dict[str, int]  # that decode the layers in few bits: name and how many layers
    formats: dict[str, int]  # of the layers: name and how many are held in it
    held_out_tokens: int
    precision_before: str
    compressed_weights: int  # how many of the model's
    weights: int


@dataclass(frozen=True)
class Decoder:
    """A model ready to decode. run: so many tokens, says how many it made; kernels: of its layers in few bits;
    bytes_read: of weights for each token."""

    run: Callable[[int], int]
    bytes_read: int
    kernels: dict[str, int] = field(default_factory=dict)


MakeDecoder = Callable[[Transformer, Mapping[str, Quantized]], Decoder]  # may repack the model in place


@dataclass(frozen=True)
class CompressionSource:
    """A run or a Hugging Face directory that is compressed: its model as it is, and the text it is measured on."""

    path: Path
    config: RunConfig
    found: disk.Checkpoint | None
    model: Transformer
    wide: torch.dtype
    dataset: Dataset
    loss: float

    @property
    def bytes(self) -> int:
        return self.config.model.parameters * self.wide.itemsize

    def copy(self) -> Transformer:
        model = Transformer(self.config.model)
        model.load_state_dict(self.model.state_dict())
        return model.eval()


def open_source(
    path: Path, data: str | None, say: Callable[[str], None], check: Callable[[Transformer], None]
) -> CompressionSource:
    """UserError, before anything is computed, where the source and `data` do not go together or `check` has one."""
    config = _config(path, data)
    found = disk.newest_of(path) if RunDirectory(path).is_run else None
    if found is not None and found.index.get("store") == QuantizedFiles.name:
        raise UserError(f"{path} is compressed already: compress the run that it was made of")
    check_first_weights(str(path), config.model)
    with torch.device("meta"):
        check(Transformer(config.model))
    dataset = prepare(config.data, config.model.vocab, say=say)
    model = Transformer(config.model)
    load_first_weights(str(path), model, config.model)
    say(f"loss of {path} on held-out text")
    wide = stored_type(path) if found is None else torch.float32
    return CompressionSource(path, config, found, model, wide, dataset, _loss(model, config, dataset))


def text_of(path: Path, data: str | None, say: Callable[[str], None]) -> tuple[RunConfig, Dataset]:
    """A run's own text, or `data` tokenised as the model's."""
    config = _config(path, data)
    return config, prepare(config.data, config.model.vocab, say=say)


def compress_run(
    path: Path, target: CompressionTarget, out: Path, decoder: MakeDecoder, *, method: Method = "rtn",
    score: Score = "magnitude", whole: bool = False, within: int | None = None, data: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Compressed:  # fmt: skip
    """Compress the run or Hugging Face directory `path` into the run directory `out`.

    within: bytes of all weights; layers that lose most in the target's format are held in wider ones up to there.
    data:   text to measure on, tokenised as the model's; of a Hugging Face directory it must be given.
    UserError, before anything is written, where source, target, method and data do not go together.
    """
    say = say or (lambda message: None)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists: give --out a new directory")
    source = open_source(path, data, say, lambda model: check_method(model, target, method, within is not None))
    say(f"compressing to {target} by {method}")
    before = decoder(source.copy(), {})
    result, store, taken = compressed(source, target, before, decoder, method, score, whole, within)
    _write(out, source, store, taken, result)
    return result


def compressed(
    source: CompressionSource, target: CompressionTarget, before: Decoder, decoder: MakeDecoder, method: Method,
    score: Score = "magnitude", whole: bool = False, within: int | None = None,
) -> tuple[Compressed, QuantizedFiles, dict[str, Tensor]]:  # fmt: skip
    """Compress a copy of the source's model and measure it; with what is to be written of it."""
    config, dataset, model = source.config, source.dataset, source.copy()
    formats: dict[str, NumberFormat] = {}
    if within is not None:
        batches = _calibration(config, dataset)
        formats = mixed_formats(model, target, within, source.wide.itemsize, batches)
    held = compress(
        model, target, method=method, score=score, whole=whole, batches=_calibration(config, dataset), formats=formats
    )
    loss_after = _loss(model, config, dataset)
    store = QuantizedFiles(held, source.wide)
    taken = store.take(model, {})
    model.eval()
    after = decoder(model, held)  # from here on the model may be packed
    # Without a kernel of its own the copy multiplies as the model before does, so that one timing is both's.
    speeds = decode_speeds(*((before, after) if after.kernels else (before,)), context=config.model.context)
    bytes_wide = sum(tensor.numel() * tensor.element_size() for tensor in taken.values())
    result = Compressed(
        to=str(target), method=method, loss_before=source.loss, loss_after=loss_after,
        loss_served=_loss(model, config, dataset) if after.kernels else None,
        bytes_before=source.bytes, bytes_after=bytes_wide + sum(weight.bytes for weight in held.values()),
        tokens_per_second_before=speeds[0], tokens_per_second_after=speeds[-1],
        bytes_read=after.bytes_read, kernels=after.kernels,
        formats=dict(Counter(weight.format.name for weight in held.values())),
        held_out_tokens=sum(batch.targets.numel() for batch in _held_out(config, dataset)),
        precision_before=_NAMES[source.wide],
        compressed_weights=sum(weight.shape.numel() for weight in held.values()), weights=config.model.parameters,
    )  # fmt: skip
    return result, store, taken


def decode_speeds(*decoders: Decoder, context: int) -> tuple[float, ...]:
    """Tokens per second of each continuing a short prompt; medians of rounds in which they take turns."""
    seconds: list[list[float]] = [[] for _ in decoders]
    count = min(DECODED_TOKENS, context - 1)
    for _ in range(ROUNDS):
        for decoder, taken in zip(decoders, seconds, strict=True):
            began = time.perf_counter()
            tokens = decoder.run(count)
            taken.append((time.perf_counter() - began) / tokens)
    return tuple(1 / statistics.median(taken) for taken in seconds)


def _config(source: Path, data: str | None) -> RunConfig:
    directory = RunDirectory(source)
    if directory.is_run:
        config = load_config(directory.config_file)
        if data is None:
            return config
        if not directory.tokenizer_file.is_file():
            raise UserError(f"{source} has no tokenizer to read --data with: leave --data out")
        document = config.model_dump(mode="json", exclude_none=True)
        kept = {key: value for key, value in document["data"].items() if key in ("cache", "end_of_text")}
        own = {"path": data, "tokenizer": str(directory.tokenizer_file.absolute())}
        return build_config(document | {"data": kept | own})
    if not source.is_dir():
        raise UserError(f"{source} is no directory: give a run's or a Hugging Face model's")
    if data is None:
        raise UserError(f"{source} is no run, so its text is not known: give --data PATH, or --data stdlib")
    config = build_config({"model": {"from": str(source)}, "data": {"path": data}}, where=str(source))
    sequence = min(config.sequence, LONGEST_SEQUENCE)
    train = config.train.model_copy(update={"start_from": None, "sequence": sequence})
    return config.model_copy(update={"train": train})


def _held_out(config: RunConfig, dataset: Dataset) -> Iterator[Any]:
    """What the run's own validation reads."""
    loader = Loader(dataset, config.data, config.sequence)
    batches = loader.validation(config.micro_batch, config.evaluation.batches * config.accumulation)
    return (batch.map(torch.from_numpy) for batch in batches)


@torch.no_grad()
def _loss(model: Transformer, config: RunConfig, dataset: Dataset) -> float:
    """Mean over all targets that count. The model is in training mode afterwards."""
    model.eval()
    total, tokens = 0.0, 0
    for batch in _held_out(config, dataset):
        losses, counted = CrossEntropy().held_out(model, batch, nullcontext)
        total, tokens = total + losses, tokens + counted
    model.train()
    return total / tokens


def _calibration(config: RunConfig, dataset: Dataset) -> Iterator[Tensor]:
    """Inputs of the first training batches. A generator: read only where the method measures inputs."""
    source = Loader(dataset, config.data, config.sequence).training(1, config.train.seed)
    for step in range(CALIBRATION_SEQUENCES // 4):
        yield torch.cat([torch.from_numpy(source.batch(4 * step + number).inputs) for number in range(4)])


def _write(
    out: Path, source: CompressionSource, store: QuantizedFiles, taken: dict[str, Tensor], result: Compressed
) -> None:
    config, found = source.config, source.found
    with complete_or_nothing(out) as partial:
        run = RunDirectory(partial)
        create_run(run, config)
        if source.dataset.tokenizer_path is not None:
            shutil.copyfile(source.dataset.tokenizer_path, run.tokenizer_file)
        step, tokens = (found.step, found.tokens) if found is not None else (0, 0)
        folder = run.checkpoints / f".{disk.name_of(step)}.partial"
        folder.mkdir()
        about = {
            "step": step, "tokens": tokens, "validation_loss": result.loss_after,
            "model": config.model.model_dump(mode="json"), "store": store.name, "sha256": store.write(folder, taken),
        }  # fmt: skip
        disk.write_index(folder, about)
        disk.publish(folder, run.checkpoints / disk.name_of(step))
        write_json(run.compression_file, {"schema": 1, "source": str(source.path), **asdict(result)})
        ledger_of(result, source).save(run.ledger_file)


def ledger_of(result: Compressed, source: CompressionSource) -> Ledger:
    """What compressing cost and saved, as a run's ledger: measured totals by the names of `Compressed`."""
    bases = {
        "loss": f"nats per token of {result.held_out_tokens:,} held-out tokens", "bytes": "of all weights",
        "tokens": f"one sequence, median of {ROUNDS} rounds in turns",
    }  # fmt: skip
    names = [f"{name}_{when}" for name in ("loss", "bytes", "tokens_per_second") for when in ("before", "after")]
    found = {name: getattr(result, name) for name in (*names, "loss_served")}
    totals = {
        name: Estimate(value, Origin.MEASURED, bases[name.partition("_")[0]])
        for name, value in found.items() if value is not None
    }  # fmt: skip
    held = ", ".join(f"{count} layers in {name}" for name, count in result.formats.items())
    memory = [MemoryLine("weights", result.bytes_after, Origin.MEASURED, held)]
    model = source.config.model.model_dump(mode="json", exclude_none=True)
    facts = {"source": "compress", "compressed": str(source.path), "model": model, "precision": result.to,
             "method": result.method, "kernels": result.kernels}  # fmt: skip
    return Ledger("run", memory=memory, totals=totals, facts=facts)
