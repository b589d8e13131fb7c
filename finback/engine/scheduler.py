"""Who computes how many tokens in the next step.

There are no phases: every sequence has tokens to catch up, one after an answer's last token, many
after a prompt. Those further along go first, so that answers flow while a long prompt is read; one
that has begun stays among the first until it ends, so that no more than `max_sequences` ever hold
a state that was touched.
"""

from dataclasses import dataclass

import numpy as np

from finback.config import EngineConfig
from finback.engine.sequence import Sequence
from finback.models.base import Run, TokenBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: the rows, and the sequence each wanted row belongs to."""

    tokens: TokenBatch
    sequences: tuple[Sequence, ...]  # in the order of the runs
    picking: tuple[Sequence, ...]  # in the order of the wanted rows


class Scheduler:
    """Holds the live sequences and fills batches within the configured limits."""

    def __init__(self, config: EngineConfig) -> None:
        """Start without sequences."""
        self._config = config
        self._live: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        self._live[sequence.number] = sequence

    def remove(self, number: int) -> Sequence | None:
        """Give a sequence up, if it is still here."""
        return self._live.pop(number, None)

    def __contains__(self, number: int) -> bool:
        return number in self._live

    def __len__(self) -> int:
        return len(self._live)

    def next_batch(self) -> Batch | None:
        """Fill a batch, or say that there is nothing to do."""
        waiting = sorted(
            self._live.values(), key=lambda s: (s.state.position == 0, s.behind > 1, s.number)
        )
        ids: list[int] = []
        runs: list[Run] = []
        wanted: list[int] = []
        chosen: list[Sequence] = []
        picking: list[Sequence] = []
        for sequence in waiting[: self._config.max_sequences]:
            count = min(sequence.behind, self._config.max_rows - len(ids))
            if count <= 0:
                break
            start = sequence.state.position
            runs.append(Run(sequence.state, len(ids), len(ids) + count))
            ids += sequence.tokens[start : start + count]
            chosen.append(sequence)
            if count == sequence.behind:
                wanted.append(len(ids) - 1)
                picking.append(sequence)
        if not runs:
            return None
        tokens = TokenBatch(np.array(ids, np.int64), tuple(runs), np.array(wanted, np.int64))
        return Batch(tokens, tuple(chosen), tuple(picking))

    def check(self) -> None:
        """Test the invariants: every live sequence has something to compute and none has ended."""
        for sequence in self._live.values():
            assert sequence.finish_reason is None
            assert sequence.behind > 0
