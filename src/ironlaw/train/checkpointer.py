"""Asynchronous checkpoints: copy the state between two steps, then write it in the background.

    seconds = checkpointer.take(step, tokens, model, states)   # training waits only for this copy
    checkpointer.write()                                       # a thread writes, checks, syncs and renames
    ...
    checkpointer.finish()                                      # at the end: wait; UserError if the last one failed

A failed write (the disk is full or gone) does no harm: earlier checkpoints stay, the run continues, and the next
checkpoint is tried when it is due.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ironlaw.config import CheckpointConfig
from ironlaw.errors import UserError
from ironlaw.files import FULL, read_json_or_empty, write_text
from ironlaw.model.config import ModelConfig
from ironlaw.observe.measured import tree_bytes
from ironlaw.train import checkpoint as disk
from ironlaw.train.checkpoint import Checkpoint, Stateful, Store, WholeFiles
from ironlaw.train.mesh import Mesh
from ironlaw.train.run_directory import RunDirectory

NICENESS = 10  # on CPU runs the writer shares cores with training, which takes precedence


class Checkpointer:
    """Writes checkpoints into `folder` and keeps those that `policy` selects. The thread calls `before_write` first.

    All `ranks` write a checkpoint together, with collectives in that thread, so each must take part in every write.
    """

    def __init__(
        self,
        folder: Path,
        policy: CheckpointConfig,
        model: ModelConfig,
        *,
        store: Store | None = None,
        ranks: Mesh | None = None,
        say: Callable[[str], None] = lambda message: None,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.policy, self.model_config = folder, policy, model
        self.store: Store = store or WholeFiles()
        self.ranks = ranks or Mesh(torch.device("cpu"))
        self.say, self.before_write = say, before_write
        self.last: Checkpoint | None = None  # the newest one known to be complete
        self.failure: str | None = None  # why the latest one was not written
        self.copied_bytes = 0  # of the latest copy
        self._taken: tuple[dict[str, Any], Any] | None = None  # index fields and tensors to write
        self._writing: Future[None] | None = None

    def take(
        self, step: int, tokens: int, model: nn.Module, states: Mapping[str, Stateful],
        validation_loss: float | None = None, **about: Any,
    ) -> float:  # fmt: skip
        """Copy everything. Returns the seconds it took, including the wait for the previous write.

        There is only one copy at a time: a disk slower than `checkpoint.every` slows the run but does not fill memory.
        """
        began = time.perf_counter()
        self.wait()
        about = {
            "step": step, "tokens": tokens, "validation_loss": validation_loss,
            "model": self.model_config.model_dump(mode="json"), "store": self.store.name, **about,
        }  # fmt: skip
        taken = self.store.take(model, states)
        self._taken, self.copied_bytes = (about, taken), tree_bytes(taken)
        return time.perf_counter() - began

    def write(self) -> None:
        """Start writing the last copy, if there is one."""
        if self._taken is not None:
            self._writing, taken, self._taken = Future(), self._taken, None
            # A daemon: a write to a disk that hangs, or with a rank that has died, must not keep the process alive.
            threading.Thread(target=self._run, name="checkpoint", args=(self._writing, *taken), daemon=True).start()

    def wait(self) -> None:
        """Wait for the write in progress, if any. Raises a programming error of the thread."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> None:
        """Wait for the last write. Raises UserError if it failed, since there is no later attempt."""
        self.wait()
        if self.failure is not None:
            raise UserError(f"{self.failure}; run again with --resume")

    # -- in the thread ---------------------------------------------------------------------------------------

    def _run(self, writing: Future[None], about: dict[str, Any], taken: Any) -> None:
        with suppress(OSError):  # on Linux the priority is the thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._write(about, taken)
            writing.set_result(None)
        except BaseException as error:  # raised in `wait`: a thread's own traceback would only be printed
            writing.set_exception(error)

    def _write(self, about: dict[str, Any], taken: Any) -> None:
        """Create the folder, write the files and the index, rename. All ranks complete each stage or all give up."""
        step, first = about["step"], self.ranks.is_rank_0
        final = self.folder / disk.name_of(step)
        partial = self.folder / f".{final.name}.{self.ranks.gather(os.getpid())[0]}.partial"
        bugs: list[Exception] = []
        self.failure = None

        def attempt(stage: Callable[[], Any], here: bool = True) -> list[Any]:
            """Run a stage unless an earlier one has failed. Returns the results of all ranks; `failure` is then why it
            failed on the first rank where it did."""
            result = problem = None
            try:
                if here and self.failure is None:
                    result = stage()
            except Exception as error:
                problem = self._disk_problem(error, step)
                if problem is None:
                    bugs.append(error)
                    problem = f"the checkpoint of step {step} was not written: {error}"
            by_rank = self.ranks.gather((result, problem))
            self.failure = self.failure or next((found for _, found in by_rank if found is not None), None)
            return [found for found, _ in by_rank]

        def prepare() -> None:
            self.before_write()
            self.folder.mkdir(exist_ok=True)  # not the run's: a run that was moved has its config elsewhere
            partial.mkdir(exist_ok=True)

        def commit() -> Checkpoint:
            files = {name: digest for rank in digests for name, digest in rank.items()}
            index = disk.write_index(partial, about | {"sha256": files})
            disk.publish(partial, final)
            write_text(RunDirectory(self.folder.parent).last_checkpoint_file, f"{step}\n")
            done = Checkpoint(final, step, about["tokens"], index)
            self.go_on_from(done)
            return done

        attempt(prepare, first)
        digests = attempt(lambda: self.store.write(partial, taken))
        self.last = attempt(commit, first)[0] or self.last
        if self.failure is not None and first:
            shutil.rmtree(partial, ignore_errors=True)
            self.say(f"{self.failure}; training goes on")
        if bugs:
            raise bugs[0]

    def _disk_problem(self, error: Exception, step: int) -> str | None:
        """Describe a disk error, or return None. Writers wrap OS errors in own types, so free space and
        the folder are checked too."""
        kept = f"that of step {self.last.step} is" if self.last else "earlier ones are"
        lost = f"the checkpoint of step {step} was not written, {kept} intact"
        full = getattr(error, "errno", None) in FULL
        if not full and isinstance(error, OSError | RuntimeError | SafetensorError):
            with suppress(OSError):
                full = shutil.disk_usage(self.folder).free < self.copied_bytes
        if full:
            return f"the disk is full: {lost}; free some space"
        if isinstance(error, OSError) or not self.folder.is_dir():
            return f"cannot write to {self.folder} ({getattr(error, 'strerror', None) or error}): {lost}"
        return None

    def go_on_from(self, last: Checkpoint) -> None:
        """Keep the newest checkpoints up to `last`, multiples of `keep_every` and the best by validation loss; rank 0
        deletes the rest, also what a killed process has left.

        Later ones are damaged ones that the run did not start from: they count as none of those.
        """
        self.last = last
        paths = [path for path in disk.complete(self.folder) if disk.step_of(path) <= last.step]
        kept = set(paths[-self.policy.keep :])
        every = self.policy.keep_every
        kept |= {path for path in paths if every and disk.step_of(path) % every == 0}
        if self.policy.keep_best:
            rated = [(loss, path) for path in paths if (loss := _validation_loss(path)) is not None]
            kept |= {path for _, path in sorted(rated)[: self.policy.keep_best]}
        for path in paths:
            if path not in kept and self.ranks.is_rank_0:
                shutil.rmtree(path, ignore_errors=True)


def _validation_loss(path: Path) -> float | None:
    loss = read_json_or_empty(path / disk.INDEX).get("validation_loss")
    return float(loss) if isinstance(loss, int | float) and loss == loss else None
