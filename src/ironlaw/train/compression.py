"""`ironlaw compress`: converts a trained model to fewer bits and measures the loss, size and speed.

Loss is the mean over held-out text in fp32 arithmetic, as in the run's own validation. Speed is that of `ironlaw
generate` for one sequence, the two models in turns, with the kernels of `numerics/quantized_linear.py`.
"""

from __future__ import annotations

import copy
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
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.chat import write_tokenizer_fields
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
from ironlaw.train.restore import QuantizedFiles, check_first_weights, check_text, load_first_weights
from ironlaw.train.run_directory import RunDirectory, complete_or_nothing, create_run

CALIBRATION_SEQUENCES = 128  # from the training text, as in the GPTQ paper
LONGEST_SEQUENCE = 2048  # for Hugging Face models, whose full context may make attention too expensive
DECODED_TOKENS, ROUNDS = 24, 5  # tokens per timing, timings per model

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class CompressionResult:
    """Metrics before and after compression: loss in nats per token, bytes of all weights, tokens/s of one sequence.

    loss_after:   with the compressed weights in fp32 arithmetic.
    loss_served:  with the decoding kernels, which may round inputs too; None if the format has no kernel, in which
                  case decoding is as before.
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
    bytes_read: int  # weight bytes read per decoded token, after compression
    kernels: dict[str, int]  # decoding kernel -> number of compressed layers that use it
    formats: dict[str, int]  # format -> number of layers held in it
    held_out_tokens: int
    precision_before: str
    compressed_weights: int  # number of weights held in few bits, out of `weights`
    weights: int


@dataclass(frozen=True)
class Decoder:
    """A model ready to decode. run: decodes that many tokens, returns the number decoded; kernels: used by compressed
    layers; bytes_read: weight bytes per token."""

    run: Callable[[int], int]
    bytes_read: int
    kernels: dict[str, int] = field(default_factory=dict)


MakeDecoder = Callable[[Transformer, Mapping[str, Quantized]], Decoder]  # may repack the model in place


@dataclass(frozen=True)
class CompressionSource:
    """The run or Hugging Face directory to compress: its original model and the text used for measurements."""

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
        return copy.deepcopy(self.model).eval()


def open_source(
    path: Path, data: str | None, say: Callable[[str], None], check: Callable[[Transformer], None]
) -> CompressionSource:
    """Open `path`. Raises UserError, before any computation, if it does not match `data` or if `check` raises it."""
    config = _config(path, data)
    found = disk.newest_of(path, say) if RunDirectory(path).is_run else None
    if found is not None and found.index.get("store") == QuantizedFiles.name:
        raise UserError(f"{path} is compressed already: compress the run that it was made of")
    check_first_weights(str(path), config.model)
    with torch.device("meta"):
        check(Transformer(config.model))
    dataset = prepare(config.data, config.model.vocab, say=say)
    check_text(path, dataset)
    model = Transformer(config.model)
    load_first_weights(str(path), model, config.model)
    say(f"loss of {path} on held-out text")
    wide = stored_type(path) if found is None else torch.float32
    return CompressionSource(path, config, found, model, wide, dataset, _loss(model, config, dataset))


def text_of(path: Path, data: str | None, say: Callable[[str], None]) -> tuple[RunConfig, Dataset]:
    """Return a run's config and own text, or `data` tokenized with the model's tokenizer."""
    config = _config(path, data)
    return config, prepare(config.data, config.model.vocab, say=say)


def compress_run(
    path: Path, target: CompressionTarget, out: Path, decoder: MakeDecoder, *, method: Method = "rtn",
    score: Score = "magnitude", whole: bool = False, within: int | None = None, data: str | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> CompressionResult:  # fmt: skip
    """Compress the run or Hugging Face directory `path` into the run directory `out`.

    within: limit for the bytes of all weights; up to it, the most sensitive layers are held in wider formats.
    data:   text to measure on, tokenized with the model's tokenizer; required for a Hugging Face directory.
    UserError is raised, before anything is written, if source, target, method and data are incompatible.
    """
    source = open_source(path, data, say, lambda model: check_method(model, target, method, within is not None))
    with complete_or_nothing(out) as partial:  # before the hours that it may take
        say(f"compressing to {target} by {method}")
        before = decoder(source.copy(), {})
        result, store, taken = measure_compression(source, target, before, decoder, method, score, whole, within)
        _write(RunDirectory(partial), source, store, taken, result)
    return result


def measure_compression(
    source: CompressionSource, target: CompressionTarget, before: Decoder, decoder: MakeDecoder, method: Method,
    score: Score = "magnitude", whole: bool = False, within: int | None = None,
) -> tuple[CompressionResult, QuantizedFiles, dict[str, Tensor]]:  # fmt: skip
    """Compress a copy of the source's model and measure it. Returns the result, and the store and tensors to write."""
    config, dataset, model = source.config, source.dataset, source.copy()
    formats: dict[str, NumberFormat] = {}
    if within is not None:
        batches = _calibration(config, dataset)
        formats = mixed_formats(model, target, within, source.wide, batches)
    quantized = compress(
        model, target, method=method, score=score, whole=whole, batches=_calibration(config, dataset), formats=formats
    )
    loss_after = _loss(model, config, dataset)
    store = QuantizedFiles(quantized, source.wide)
    taken = store.take(model, {})
    model.eval()
    after = decoder(model, quantized)  # may pack the model in place
    # Without a kernel for its format the copy multiplies in the same way as the original: one timing serves both.
    speeds = decode_speeds(*((before, after) if after.kernels else (before,)), context=config.model.context)
    result = CompressionResult(
        to=str(target), method=method, loss_before=source.loss, loss_after=loss_after,
        loss_served=_loss(model, config, dataset) if after.kernels else None,
        bytes_before=source.bytes,
        bytes_after=sum(tensor.nbytes for tensor in taken.values()) + sum(each.bytes for each in quantized.values()),
        tokens_per_second_before=speeds[0], tokens_per_second_after=speeds[-1],
        bytes_read=after.bytes_read, kernels=after.kernels,
        formats=dict(Counter(weight.format.name for weight in quantized.values())),
        held_out_tokens=sum(batch.targets.numel() for batch in _held_out(config, dataset)),
        precision_before=_NAMES[source.wide],
        compressed_weights=sum(weight.shape.numel() for weight in quantized.values()), weights=config.model.parameters,
    )  # fmt: skip
    return result, store, taken


def decode_speeds(*decoders: Decoder, context: int) -> tuple[float, ...]:
    """Return the median tokens per second of each decoder, which continue a short prompt in turns."""
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
    """Return the batches that the run's own validation reads."""
    loader = Loader(dataset, config.data, config.sequence)
    batches = loader.validation(config.micro_batch, config.evaluation.batches * config.train.global_batch)
    return (batch.map(torch.from_numpy) for batch in batches)


@torch.no_grad()
def _loss(model: Transformer, config: RunConfig, dataset: Dataset) -> float:
    """Return the mean loss over all targets. Leaves the model in training mode."""
    model.eval()
    total, tokens = 0.0, 0
    for batch in _held_out(config, dataset):
        losses, counted = CrossEntropy().held_out(model, batch, nullcontext)
        total, tokens = total + losses, tokens + counted
    model.train()
    return total / tokens


def _calibration(config: RunConfig, dataset: Dataset) -> Iterator[Tensor]:
    """Yield inputs of the first training batches. Lazy: read only if the method uses calibration data."""
    source = Loader(dataset, config.data, config.sequence).training(1, config.train.seed)
    for step in range(CALIBRATION_SEQUENCES // 4):
        yield torch.cat([torch.from_numpy(source.batch(4 * step + number).inputs) for number in range(4)])


def _write(
    run: RunDirectory, source: CompressionSource, store: QuantizedFiles, taken: dict[str, Tensor],
    result: CompressionResult,
) -> None:  # fmt: skip
    config, found = source.config, source.found
    create_run(run, config)
    if source.dataset.tokenizer_path is not None:
        shutil.copyfile(source.dataset.tokenizer_path, run.tokenizer_file)
        own = RunDirectory(source.path).tokenizer_file if found is not None else source.path
        write_tokenizer_fields(run.path, tokenizers.load(own, config.data.end_of_text))
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


def ledger_of(result: CompressionResult, source: CompressionSource) -> Ledger:
    """Return cost and savings of the compression as a run's ledger; totals are named as the result's fields."""
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
    layers = ", ".join(f"{count} layers in {name}" for name, count in result.formats.items())
    memory = [MemoryLine("weights", result.bytes_after, Origin.MEASURED, layers)]
    model = source.config.model.model_dump(mode="json", exclude_none=True)
    facts = {"source": "compress", "compressed": str(source.path), "model": model, "precision": result.to,
             "method": result.method, "kernels": result.kernels}  # fmt: skip
    return Ledger("run", memory=memory, totals=totals, facts=facts)
