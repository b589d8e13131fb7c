"""Drafts on and off, in turn: a text that repeats its prompt with small edits, and prose.

What is written is laid down, token by token, so that the same text comes whatever the weights are;
each token is picked by the engine all the same, and verified if it was a draft.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finback.bench.stream import drop_cached
from finback.checkpoint.formats import Mask
from finback.checkpoint.index import open_checkpoint
from finback.config import DRAFT_NAMES, SamplingParams
from finback.hub.local import STORYTELLER
from finback.llm import LLM
from finback.text.tokenizer import load_tokenizer

EDIT_EVERY = 25  # tokens


@dataclass(slots=True)
class DraftRow:
    """One task with one kind of drafts; medians over the rounds."""

    task: str
    drafts: str
    tokens_per_s: float = 0.0
    tokens_per_step: float = 0.0
    drafted: int = 0
    stood: int = 0
    speedup: float = 1.0  # over the same without drafts


@dataclass(slots=True)
class DraftReport:
    """All tasks."""

    tokens: int
    rows: list[DraftRow] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Give the report as plain values."""
        return asdict(self)


class _LaidDown:
    """A constraint that allows one text."""

    def __init__(self, text: list[int], size: int) -> None:
        self._text, self._at = text, 0
        self._mask = np.zeros(size, bool)

    def allowed(self) -> Mask:
        self._mask[:] = False
        self._mask[self._text[self._at]] = True
        return self._mask

    def accept(self, token: int) -> bool:
        self._at += 1
        return self._at == len(self._text)

    def forced(self) -> list[int]:
        return []


def measure_drafts(
    folder: Path,
    tokens: int = 96,
    rounds: int = 3,
    cold: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> DraftReport:
    """Write laid down texts with drafts and without, in alternating rounds.

    Args:
        folder: A model.
        tokens: Of each text.
        rounds: Medians are taken of.
        cold: Drop the page cache's share of the files first.
        progress: Told what is being done.
        options: Fields of EngineConfig.
    """
    if cold:
        drop_cached([folder / name for name in open_checkpoint(folder).files])
    report, found = DraftReport(tokens), dict[tuple[str, str], list[DraftRow]]()
    with LLM(folder, drafts="lookup", **options) as llm:
        tasks = _tasks(tokens, llm.engine.model.shape.vocab_size)
        for number in range(rounds):
            for task, (prompt, text) in tasks.items():
                for drafts in DRAFT_NAMES:
                    progress(f"round {number + 1} of {rounds}: {task}, drafts {drafts}")
                    row = _write(llm, prompt, text, task, drafts)
                    found.setdefault((task, drafts), []).append(row)
    for (task, drafts), rows in found.items():
        row = DraftRow(task, drafts)
        for name in ("tokens_per_s", "tokens_per_step", "drafted", "stood"):
            setattr(row, name, statistics.median(getattr(one, name) for one in rows))
        pairs = zip(rows, found[task, "off"], strict=True)
        row.speedup = statistics.median(on.tokens_per_s / off.tokens_per_s for on, off in pairs)
        report.rows.append(row)
    return report


def _tasks(tokens: int, size: int) -> dict[str, tuple[list[int], list[int]]]:
    """Give prompt and text of each task, as ids below `size`."""
    prose = (STORYTELLER / "README.md").read_text("utf-8")
    ids = [n % size for n in load_tokenizer(STORYTELLER).encode(prose)]
    while len(ids) < 2 * tokens:
        ids += ids
    copied = ids[:tokens]
    edited = [
        (token + 1) % size if n % EDIT_EVERY == EDIT_EVERY - 1 else token
        for n, token in enumerate(copied)
    ]
    return {"copy-editing": (copied, edited), "prose": (ids[:8], ids[8 : 8 + tokens])}


def _write(llm: LLM, prompt: list[int], text: list[int], task: str, drafts: str) -> DraftRow:
    llm.use_drafts(drafts != "off")
    params = SamplingParams(max_tokens=len(text), ignore_eos=True, seed=1)
    laid_down = _LaidDown(text, llm.engine.model.shape.vocab_size)
    number = llm.engine.add(prompt, params, laid_down)
    written: list[int] = []
    while not written:
        for delta in llm.engine.step():
            written += delta.token_ids
    start, before = time.perf_counter(), llm.spans.snapshot()
    while llm.engine.is_live(number):
        for delta in llm.engine.step():
            written += delta.token_ids
    taken, counts = time.perf_counter() - start, llm.spans.since(before).counts
    assert written == text
    return DraftRow(
        task,
        drafts,
        (len(text) - 1) / taken,
        (len(text) - 1) / counts["steps"],
        counts.get("drafts", 0),
        counts.get("drafts_stood", 0),
    )
