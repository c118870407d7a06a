"""`ironlaw compress`: a trained model into one in fewer bits, with what that costs and what it saves.

Loss is the mean over held-out text in fp32 arithmetic, as the run's own validation computes it; speed is that of
`ironlaw generate`, one sequence at a time, both models in turns.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ironlaw.config import RunConfig, build_config, load_config
from ironlaw.data.dataset import Dataset
from ironlaw.data.loader import Loader
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError
from ironlaw.files import write_json
from ironlaw.model.huggingface.weights import stored_type
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.compression import Method, Target, check_method, compress
from ironlaw.numerics.pruning import Score
from ironlaw.train import checkpoint as disk
from ironlaw.train.evaluation import evaluate
from ironlaw.train.quantized_store import QuantizedFiles
from ironlaw.train.restore import check_resumable, load
from ironlaw.train.run_directory import RunDirectory, complete_or_nothing, create_run
from ironlaw.train.start import check_first_weights, load_first_weights

CALIBRATION_SEQUENCES = 128  # of the training text: the number of the GPTQ paper
LONGEST_SEQUENCE = 2048  # of a Hugging Face model's text, whose context may be more than attention can be paid for
DECODED_TOKENS, ROUNDS = 24, 5  # of each timing, and timings of each model

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Compressed:
    """Before and after. Loss in nats per token, bytes of all weights, tokens per second of one sequence."""

    to: str
    method: str
    loss_before: float
    loss_after: float
    bytes_before: int
    bytes_after: int
    tokens_per_second_before: float
    tokens_per_second_after: float
    held_out_tokens: int
    precision_before: str
    compressed_weights: int  # how many of the model's
    weights: int


Decoder = Callable[[Transformer], Callable[[int], int]]


def compress_run(
    source: Path, target: Target, out: Path, decoder: Decoder, *, method: Method = "rtn", score: Score = "magnitude",
    whole: bool = False, data: str | None = None, say: Callable[[str], None] | None = None,
) -> Compressed:  # fmt: skip
    """Compress the run or Hugging Face directory `source` into the run directory `out`.

    decoder: what makes of a model a function that decodes so many tokens, and says how many it made.
    data: text to measure on, tokenised as the model's; of a Hugging Face directory it must be given.
    UserError, before anything is written, where source, target, method and data do not go together.
    """
    say = say or (lambda message: None)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists: give --out a new directory")
    config = _config(source, data)
    found = disk.newest_of(source) if RunDirectory(source).is_run else None
    if found is not None:
        check_resumable(found)
    else:
        check_first_weights(str(source), config.model)
    with torch.device("meta"):
        check_method(Transformer(config.model), target, method)
    dataset = prepare(config.data, config.model.vocab, say=say)
    before, model = Transformer(config.model), Transformer(config.model)
    _load(found, source, before, config)
    model.load_state_dict(before.state_dict())
    wide = stored_type(source) if found is None else torch.float32
    say(f"loss of {source} on held-out text")
    loss_before = _loss(before, config, dataset)
    say(f"compressing to {target} by {method}")
    held = compress(
        model.eval(), target, method=method, score=score, whole=whole, batches=_calibration(config, dataset)
    )
    loss_after = _loss(model, config, dataset)
    store = QuantizedFiles(held, wide)
    taken = store.take(model, {})
    speeds = decode_speeds(decoder, before.eval(), model.eval())  # last: an engine may pack the weights
    bytes_wide = sum(tensor.numel() * tensor.element_size() for tensor in taken.values())
    result = Compressed(
        to=str(target), method=method, loss_before=loss_before, loss_after=loss_after,
        bytes_before=config.model.parameters * wide.itemsize,
        bytes_after=bytes_wide + sum(weight.bytes for weight in held.values()),
        tokens_per_second_before=speeds[0], tokens_per_second_after=speeds[1],
        held_out_tokens=sum(batch.targets.numel() for batch in _held_out(config, dataset)),
        precision_before=_NAMES[wide],
        compressed_weights=sum(weight.shape.numel() for weight in held.values()),
        weights=config.model.parameters,
    )  # fmt: skip
    _write(out, config, dataset, store, taken, found, result, source)
    return result


def decode_speeds(decoder: Decoder, *models: Transformer) -> tuple[float, ...]:
    """Tokens per second of each model continuing a short prompt; medians of rounds in which they take turns."""
    seconds: list[list[float]] = [[] for _ in models]
    count = min(DECODED_TOKENS, models[0].config.context - 1)
    decoders = [decoder(model) for model in models]
    for _ in range(ROUNDS):
        for decode, taken in zip(decoders, seconds, strict=True):
            began = time.perf_counter()
            tokens = decode(count)
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
        fields = {"path": data, "tokenizer": str(directory.tokenizer_file.absolute()), "cache": config.data.cache}
        fields["end_of_text"] = config.data.end_of_text
        document = config.model_dump(mode="json", exclude_none=True)
        return build_config(document | {"data": {k: v for k, v in fields.items() if v is not None}})
    if not source.is_dir():
        raise UserError(f"{source} is no directory: give a run's or a Hugging Face model's")
    if data is None:
        raise UserError(f"{source} is no run, so its text is not known: give --data PATH, or --data stdlib")
    config = build_config({"model": {"from": str(source)}, "data": {"path": data}}, where=str(source))
    sequence = min(config.sequence, LONGEST_SEQUENCE)
    train = config.train.model_copy(update={"start_from": None, "sequence": sequence})
    return config.model_copy(update={"train": train})


def _load(found: disk.Checkpoint | None, source: Path, model: Transformer, config: RunConfig) -> None:
    if found is not None:
        load(found, model, config.model)
    else:
        load_first_weights(str(source), model, config.model)


def _held_out(config: RunConfig, dataset: Dataset) -> Iterator[Any]:
    """What the run's own validation reads."""
    loader = Loader(dataset, config.data, config.sequence)
    batches = loader.validation(config.micro_batch, config.evaluation.batches * config.accumulation)
    return (batch.map(torch.from_numpy) for batch in batches)


def _loss(model: Transformer, config: RunConfig, dataset: Dataset) -> float:
    return evaluate(model, _held_out(config, dataset), nullcontext)


def _calibration(config: RunConfig, dataset: Dataset) -> Iterator[Tensor]:
    """Inputs of the first training batches. A generator: read only where the method measures inputs."""
    source = Loader(dataset, config.data, config.sequence).training(1, config.train.seed)
    for step in range(CALIBRATION_SEQUENCES // 4):
        yield torch.cat([torch.from_numpy(source.batch(4 * step + number).inputs) for number in range(4)])


def _write(
    out: Path, config: RunConfig, dataset: Dataset, store: QuantizedFiles, taken: dict[str, Tensor],
    found: disk.Checkpoint | None, result: Compressed, source: Path,
) -> None:  # fmt: skip
    with complete_or_nothing(out) as partial:
        run = RunDirectory(partial)
        create_run(run, config)
        if dataset.tokenizer_path is not None:
            shutil.copyfile(dataset.tokenizer_path, run.tokenizer_file)
        step, tokens = (found.step, found.tokens) if found is not None else (0, 0)
        folder = run.checkpoints / f".{disk.name_of(step)}.partial"
        folder.mkdir()
        about = {
            "step": step, "tokens": tokens, "validation_loss": result.loss_after,
            "model": config.model.model_dump(mode="json"), "store": store.name, "sha256": store.write(folder, taken),
        }  # fmt: skip
        disk.write_index(folder, about)
        disk.publish(folder, run.checkpoints / disk.name_of(step))
        write_json(run.compression_file, {"schema": 1, "source": str(source), **asdict(result)})
