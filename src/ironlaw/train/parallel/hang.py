"""A collective that some rank never enters: who is missing, where it is instead, and who waits for it where.

Each rank leaves a `Note` of what it does in the job's store every few seconds (`watcher.py`). The first whose
collective has waited too long reads all of them and says it in one line. The decision is a function of the notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from pydantic import TypeAdapter

from ironlaw.train.parallel.flight_recorder import RecordedCollective

STALE_SECONDS = 5.0
"""A note older than the newest by this, and by thrice what is usual, is of a process that is stopped or gone."""


@dataclass(frozen=True)
class Note:
    """What one rank does. `last`: its latest operation of each group; `waits`: the one it is in, None outside."""

    rank: int
    host: str
    step: int  # the one under way, from 1
    where: str  # innermost line of the training thread outside PyTorch
    written_seconds: float  # time.time()
    last: tuple[RecordedCollective, ...] = ()
    waits: RecordedCollective | None = None
    message: bool = False  # waits for a message of another pipeline stage, which no recorder lists
    waited_seconds: float = 0.0

    @property
    def blocked(self) -> bool:
        return self.waits is not None or self.message

    def reached(self, operation: RecordedCollective) -> bool:
        """Whether this rank has called the same operation of the same group."""
        there = [o.number for o in self.last if o.members == operation.members]
        return bool(there) and max(there) >= operation.number


NOTE_JSON = TypeAdapter(Note)


def quiet(notes: Sequence[Note]) -> list[Note]:
    """The ranks whose notes have stopped: whatever the last one says."""
    newest = max((note.written_seconds for note in notes), default=0.0)
    ages = [newest - note.written_seconds for note in notes]
    limit = max(STALE_SECONDS, 3 * median_low(ages)) if ages else 0.0
    return [note for note, age in zip(notes, ages, strict=True) if age > limit]


def absent(notes: Sequence[Note]) -> list[Note]:
    """The ranks whose notes have stopped; failing these, those that others wait for and that wait for nobody; then
    those that never come to a collective because they wait in another one; failing these too, nobody."""
    stopped = quiet(notes)
    if stopped:
        return stopped
    by_rank = {note.rank: note for note in notes}
    missing = {
        member
        for note in notes if note.waits is not None
        for member in note.waits.members if member in by_rank and not by_rank[member].reached(note.waits)
    }  # fmt: skip
    silent = [note for note in notes if note.rank in missing and not note.blocked]
    if not silent and any(note.message for note in notes):  # stages wait for messages: of whom, nobody recorded
        silent = [note for note in notes if not note.blocked]
    if silent:
        return silent
    behind = [by_rank[rank] for rank in sorted(missing)]
    return behind if len(behind) < len(notes) else []


def report(notes: Sequence[Note], now_seconds: float) -> str:
    """One line: "rank 3 on node7 is at step 17 in data/loader.py:88, its last operation ... #212 over shard; ..." """
    waited = max((note.waited_seconds for note in notes), default=0.0)
    culprits, stopped = absent(notes), quiet(notes)
    parts = [_whereabouts(note, now_seconds - note.written_seconds if note in stopped else 0) for note in culprits[:4]]
    if len(culprits) > 4:
        parts.append(f"{len(culprits) - 4} more ranks are missing")
    places: dict[str, list[int]] = {}
    for note in notes:
        if note.blocked and note not in culprits:
            places.setdefault(f"{_operation_of(note)}, step {note.step}", []).append(note.rank)
    others = [f"{_ranks(ranks)} wait{'' if len(ranks) > 1 else 's'} in {place}" for place, ranks in places.items()]
    if not culprits:
        others.append("all have called it: look at the network between them")
    return f"nothing has moved for {waited:.0f} s: {'; '.join(parts + others)}"


def _whereabouts(note: Note, silence_seconds: float) -> str:
    line = f"rank {note.rank} on {note.host} is at step {note.step}"
    if note.blocked:
        line += f", waiting in {_operation_of(note)}"
    else:
        line += f" in {note.where}"
        latest = max(note.last, key=lambda o: o.started_seconds, default=None)
        line += f", its last operation {latest}" if latest is not None else ", before its first operation"
    return line + (f", not heard of for {silence_seconds:.0f} s" if silence_seconds else "")


def _operation_of(note: Note) -> str:
    return str(note.waits) if note.waits is not None else f"a message between stages ({note.where})"


def _ranks(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return ("rank " if len(ranks) == 1 else "ranks ") + text
