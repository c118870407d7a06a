"""The same observation as a callback of Hugging Face's Trainer and of Lightning.

    Trainer(..., callbacks=[trainer_callback("runs/mine")])                # transformers
    Trainer(..., callbacks=[lightning_callback("runs/mine")])              # lightning, pytorch-lightning

Neither library is a dependency: the classes are made when they are asked for.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ironlaw.errors import UserError
from ironlaw.observe.watch import Watch


def _observing(base: Any, out: str | Path | None, options: dict[str, Any]) -> Any:
    """Returns a callback class with a watch that lasts from `begin` to `end`."""

    class Observing(base):
        watch: Watch | None = None

        def begin(self, model: Any, optimizers: Any) -> None:
            self.watch = Watch(model, optimizers, out, **options).__enter__()

        def end(self) -> None:
            if self.watch is not None:
                self.watch.__exit__(None, None, None)
                self.watch = None

    return Observing


def trainer_callback(out: str | Path | None = None, **options: Any) -> Any:
    """A `transformers.TrainerCallback`; `options` are those of `observe`."""
    try:
        base = importlib.import_module("transformers").TrainerCallback
    except ImportError:
        raise UserError("trainer_callback needs transformers: pip install 'ironlaw[hf]'") from None

    class IronlawTrainerCallback(_observing(base, out, options)):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.begin(given["model"], given["optimizer"])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
            if self.watch is not None and logs and "loss" in logs:
                self.watch.log(loss=float(logs["loss"]))

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.end()

    return IronlawTrainerCallback()


def lightning_callback(out: str | Path | None = None, **options: Any) -> Any:
    """A `lightning.pytorch.Callback`; `options` are those of `observe`."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            base = importlib.import_module(name).Callback
            break
        except ImportError:
            continue
    else:
        raise UserError("lightning_callback needs lightning: pip install lightning")

    class IronlawLightningCallback(_observing(base, out, options)):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.begin(module, trainer.optimizers)
            # Lightning calls `training_step`, which calls what it likes: that is the forward pass.
            step = module.training_step

            def training_step(*args: Any, **kwargs: Any) -> Any:
                with self.watch.forward():
                    return step(*args, **kwargs)

            module.training_step = training_step

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if self.watch is not None and loss is not None:
                self.watch.log(loss=loss.detach())

        def on_train_end(self, trainer: Any, module: Any) -> None:
            module.__dict__.pop("training_step", None)
            self.end()

    return IronlawLightningCallback()
