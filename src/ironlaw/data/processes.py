"""Batches made by processes of their own, for when the training process has no time for it.

Process w of W makes the batches of steps w, w + W, ...: the order is a function of the step, so who makes a batch
changes nothing. Batches come through memory that both sides map; a slot is filled anew once it has been copied out.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from ironlaw.data.batch import Batch
from ironlaw.data.batches import empty
from ironlaw.errors import UserError

Open = Callable[[], Any]  # gives a BatchSource; pickled, so a function of a module or a partial of one


class ProcessBatches:
    """The batches of `opener()`, made `depth` ahead by each of `processes`. Steps are asked for in order."""

    def __init__(self, opener: Open, share: int, sequence: int, documents: bool, processes: int, depth: int):
        self.share, self.sequence, self.documents = share, sequence, documents
        self.seconds = {"read": 0.0, "pack": 0.0}  # of all processes, by how many there are
        self._opener, self._processes, self._depth = opener, processes, depth
        self._workers: list[_Worker] = []
        self._next: int | None = None

    def batch(self, step: int) -> Batch[np.ndarray]:
        if step != self._next:
            self.close()
            self._workers = [
                _Worker(self._opener, step + number, self._processes, self._depth, self._empty_like())
                for number in range(self._processes)
            ]
            self._first = step
        self._next = step + 1
        worker = self._workers[(step - self._first) % self._processes]
        batch, seconds = worker.take()
        for stage, spent in seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent / self._processes
        return batch

    def _empty_like(self) -> Batch[np.ndarray]:
        return empty(self.share, self.sequence, self.documents)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers, self._next = [], None


class _Worker:
    """One process and the slots that it fills."""

    def __init__(self, opener: Open, first: int, stride: int, depth: int, like: Batch[np.ndarray]):
        self._like = like
        self._memory = SharedMemory(create=True, size=depth * _slot_bytes(like))
        self._slots = [_slot(self._memory, i, like) for i in range(depth)]
        context = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
        self._pipe, theirs = context.Pipe()
        shape = (*like.inputs.shape, like.documents is not None)
        self._process = context.Process(
            target=_work, args=(opener, first, stride, depth, shape, self._memory.name, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def take(self) -> tuple[Batch[np.ndarray], dict[str, float]]:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise UserError(
                f"a process of data.loader_processes ended by itself (exit code {self._process.exitcode}): if memory "
                "ran out lower data.loader_processes or data.prefetch"
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        slot, seconds = answer
        batch = self._slots[slot].map(np.copy)
        self._pipe.send(slot)  # free again
        return batch, seconds

    def close(self) -> None:
        self._pipe.close()  # which ends the process
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._slots = []
        self._memory.close()
        self._memory.unlink()


def _slot_bytes(like: Batch[np.ndarray]) -> int:
    return sum(array.nbytes for array in (like.inputs, like.targets, like.documents) if array is not None)


def _slot(memory: SharedMemory, number: int, like: Batch[np.ndarray]) -> Batch[np.ndarray]:
    """The arrays of one slot, in the memory itself."""
    at = number * _slot_bytes(like)

    def lay(array: np.ndarray) -> np.ndarray:
        nonlocal at
        laid: np.ndarray = np.ndarray(array.shape, array.dtype, buffer=memory.buf, offset=at)
        at += array.nbytes
        return laid

    return like.map(lay)


def _work(
    opener: Open, step: int, stride: int, depth: int, shape: tuple[int, int, bool], memory_name: str, pipe: Connection
) -> None:  # fmt: skip
    """The process: fill free slots with the batches of every `stride`-th step until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    memory = SharedMemory(memory_name)
    try:
        _fill(opener(), step, stride, [_slot(memory, i, empty(*shape)) for i in range(depth)], pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the run is over
    except BaseException as error:
        pipe.send(error)
    memory.close()


def _fill(batches: Any, step: int, stride: int, slots: list[Batch[np.ndarray]], pipe: Connection) -> None:
    free = list(range(len(slots)))
    while True:
        while not free or pipe.poll():
            free.append(pipe.recv())
        start = time.perf_counter()
        before = dict(batches.seconds)
        batch = batches.batch(step)
        slot = free.pop(0)
        target = slots[slot]
        target.inputs[:], target.targets[:] = batch.inputs, batch.targets
        if target.documents is not None:
            target.documents[:] = batch.documents
        seconds = {stage: spent - before[stage] for stage, spent in batches.seconds.items()}
        seconds["read"] += time.perf_counter() - start - sum(seconds.values())
        pipe.send((slot, seconds))
        step += stride
