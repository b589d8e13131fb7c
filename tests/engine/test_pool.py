"""Memory of states goes round: used again, never by two, never more than was in use at once."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from finback import LLM, Request
from finback.config import SamplingParams
from finback.engine.drafts import DraftController
from finback.engine.snapshots import list_snapshots
from finback.engine.statefile import read_header
from finback.storage.arena import MemoryPool
from tests.conftest import DATA

PROMPTS = ("The whale", "A ship on the sea and the wind", "x")


def test_memory_comes_round_by_size() -> None:
    pool = MemoryPool()
    one, other = pool.take(8192), pool.take(8192)
    assert not np.shares_memory(one, other)
    pool.give_back(one)
    assert pool.num_bytes == 8192
    assert len(pool.take(4096)) == 4096
    assert np.shares_memory(pool.take(8192), one)
    assert pool.num_bytes == 0


def test_ended_sequences_leave_their_memory_to_the_next(tiny: Path) -> None:
    options = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    with LLM(tiny) as llm:
        alone = [llm.generate(prompt, **options).token_ids for prompt in PROMPTS]
        of_one = llm.engine.memory.num_bytes
        assert of_one > 0
        assert [out.token_ids for out in llm.generate(list(PROMPTS), **options)] == alone
        assert llm.engine.memory.num_bytes == 3 * of_one
        llm.logprobs(["The whale and the sea"])  # layer by layer
        llm.logits(llm.tokenize("The whale"))
        stream = llm.stream("x", max_tokens=9, ignore_eos=True)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.engine.memory.num_bytes == 3 * of_one
        assert [llm.generate(prompt, **options).token_ids for prompt in PROMPTS] == alone


def test_what_fails_leaves_its_memory_too() -> None:
    with LLM(DATA / "tiny-k3", max_sequences=2) as llm:
        batch = llm.batch([Request(prompt=prompt) for prompt in PROMPTS])
        next(batch)
        batch.close()  # type: ignore[attr-defined]
        held = llm.engine.memory.num_bytes

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        forward, llm.engine.model.forward = llm.engine.model.forward, interrupted  # type: ignore
        with pytest.raises(KeyboardInterrupt):
            llm.generate("x")
        llm.engine.model.forward = forward  # type: ignore[method-assign]
        llm.engine.check()
        assert llm.engine.memory.num_bytes == held


def drop_in_a_step(llm: LLM, numbers: tuple[int, ...]) -> None:
    calls, linear = itertools.count(), llm.ops.linear

    def drop(*args: Any) -> Any:
        if next(calls) == 3:
            for number in numbers:
                llm.engine.abort(number)
        return linear(*args)

    llm.ops.linear = drop  # type: ignore[method-assign]


def test_a_stream_that_is_forgotten_in_the_middle_of_a_step_harms_no_other(
    tiny: Path, tmp_path: Path
) -> None:
    """Python may end a generator at any time; what the step works on must stay until its end."""
    options = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    with LLM(tiny) as llm:
        alone = [llm.generate(prompt, **options).token_ids for prompt in PROMPTS]
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"max_sequences": 3, "resident_sequences": 1},
        {"states": str(tmp_path / "states")},
    )
    for way in ways:
        with LLM(tiny, **way) as llm:
            engine = llm.engine
            text = engine.add_text(llm.tokenize("The whale and the sea"), 1)
            params = SamplingParams(**options)
            numbers = [engine.add(llm.tokenize(prompt), params) for prompt in PROMPTS]
            drop_in_a_step(llm, (numbers[0], text))
            answers: dict[int, list[int]] = {number: [] for number in numbers}
            while not engine.is_idle:
                for delta in engine.step():
                    assert delta.error is None
                    answers.setdefault(delta.number, []).extend(delta.token_ids)
            assert [answers[number] for number in numbers[1:]] == alone[1:]
            engine.check()
            for path in (tmp_path / "states").glob("*"):
                assert path.suffix == ".state"
    with LLM(tiny, states=str(tmp_path / "states")) as llm:
        assert llm.engine.snapshots is not None
        for one in list_snapshots(tmp_path / "states"):
            header, _ = read_header(one.path)
            assert llm.engine.snapshots.load(one, header["tokens"], llm.engine.model, MemoryPool())


def test_drafters_share_the_memory_of_their_model(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftController, "width", lambda *_: 3)
    with LLM(tiny, drafts=str(tiny), max_sequences=3) as llm:
        llm.generate(list(PROMPTS), max_tokens=8, temperature=0, ignore_eos=True)
        any_sequence: Any = SimpleNamespace(sampling=SamplingParams(), seed=0)
        drafter: Any = llm.engine.make_drafter(any_sequence)
        of_one = llm.engine.memory.num_bytes // 3
        assert of_one < drafter._state.memory.num_bytes <= 4 * of_one
