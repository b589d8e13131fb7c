"""The engine with a model whose logits are chosen: the next token is the last one plus one."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from finback.config import SamplingParams
from finback.engine.engine import Engine
from finback.engine.scheduler import StepLimits
from finback.errors import ContextTooLong, DamagedFile, ReadError, RequestError
from finback.models.base import ModelShape, TokenBatch
from finback.spans import Spans

VOCAB = 50


class Counting:
    """Predicts the successor of every token and records the batches it is given."""

    shape = ModelShape(1, 1, VOCAB, 40, (), 1, 1, 0, 0, 0, 0, 0, 0, 0)

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def forward(self, tokens: TokenBatch) -> np.ndarray:
        self.batches.append([run.stop - run.start for run in tokens.runs])
        out = np.zeros((len(tokens.wanted), VOCAB), np.float32)
        out[np.arange(len(out)), (tokens.ids[tokens.wanted] + 1) % VOCAB] = 9
        return out

    def logits(self, rows: np.ndarray, at_once: int) -> Generator[np.ndarray]:
        for start in range(0, len(rows), at_once):
            yield rows[start : start + at_once]


def engine_of(stop_ids: tuple[int, ...] = (), **options: Any) -> tuple[Engine, Counting]:
    model = Counting()
    return Engine(model, StepLimits(**options), Spans(), stop_ids), model


GREEDY = SamplingParams(temperature=0)


def run_all(engine: Engine) -> dict[int, tuple[list[int], str | None]]:
    out: dict[int, tuple[list[int], str | None]] = {}
    while not engine.is_idle:
        for delta in engine.step():
            tokens, _ = out.get(delta.number, ([], None))
            out[delta.number] = (tokens + delta.token_ids, delta.finish_reason)
        engine.check()
    return out


def test_a_stop_token_ends_an_answer() -> None:
    engine, _ = engine_of(stop_ids=(7,))
    number = engine.add([3], GREEDY)
    assert run_all(engine) == {number: ([4, 5, 6, 7], "stop")}


def test_stop_tokens_can_be_ignored_and_added() -> None:
    engine, _ = engine_of(stop_ids=(7,))
    number = engine.add([3], GREEDY.replaced(ignore_eos=True, stop_token_ids=(9,)))
    assert run_all(engine)[number] == ([4, 5, 6, 7, 8, 9], "stop")


def test_max_tokens_and_the_context_end_an_answer() -> None:
    engine, _ = engine_of()
    short = engine.add([3], GREEDY.replaced(max_tokens=2))
    full = engine.add([0] * 38, GREEDY)
    assert run_all(engine) == {short: ([4, 5], "length"), full: ([1, 2], "length")}


def test_prompts_are_cut_to_the_row_limit_and_answers_go_first() -> None:
    engine, model = engine_of(max_rows=4)
    engine.add([1], GREEDY.replaced(max_tokens=4))
    engine.step()
    engine.add([1] * 9, GREEDY.replaced(max_tokens=1))
    run_all(engine)
    assert model.batches == [[1], [1, 3], [1, 3], [1, 3]]


def test_sequences_join_and_leave_between_steps() -> None:
    engine, model = engine_of()
    first = engine.add([0], GREEDY.replaced(max_tokens=3))
    engine.step()
    second = engine.add([10], GREEDY.replaced(max_tokens=3))
    result = run_all(engine)
    assert result[first][0] == [2, 3]
    assert result[second][0] == [11, 12, 13]
    assert model.batches == [[1], [1, 1], [1, 1], [1]]


class Failing(Counting):
    """Fails, or gives logits that are no numbers, when it sees certain tokens."""

    def __init__(self, fail_on: int, error: BaseException | None) -> None:
        super().__init__()
        self.fail_on, self.error = fail_on, error

    def forward(self, tokens: TokenBatch) -> np.ndarray:
        out = super().forward(tokens)
        if self.error is not None and self.fail_on in tokens.ids:
            raise self.error
        out[tokens.ids[tokens.wanted] == self.fail_on] = np.nan
        return out


def test_a_step_that_fails_ends_its_sequences_with_the_error() -> None:
    model = Failing(7, ReadError("the disk is gone"))
    engine = Engine(model, StepLimits(max_sequences=2), Spans())
    engine.add([5], GREEDY.replaced(max_tokens=9))
    engine.add([20], GREEDY.replaced(max_tokens=9))
    waiting = engine.add([30], GREEDY.replaced(max_tokens=2))
    deltas = [delta for _ in range(3) for delta in engine.step()]
    failed = [delta for delta in deltas if delta.finish_reason == "error"]
    assert [str(delta.error) for delta in failed] == ["the disk is gone"] * 2
    engine.check()
    assert run_all(engine) == {waiting: ([31, 32], "length")}


def test_an_interrupted_step_drops_its_sequences() -> None:
    engine = Engine(Failing(6, KeyboardInterrupt()), StepLimits(), Spans())
    number = engine.add([5], GREEDY)
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.is_live(number)
    assert engine.is_idle


def test_logits_that_are_no_numbers_end_their_sequence_alone() -> None:
    engine = Engine(Failing(7, None), StepLimits(), Spans())
    bad = engine.add([5], GREEDY.replaced(max_tokens=9))
    good = engine.add([20], GREEDY.replaced(max_tokens=5))
    ended = {}
    while not engine.is_idle:
        for delta in engine.step():
            if delta.finish_reason:
                ended[delta.number] = (delta.finish_reason, type(delta.error))
        engine.check()
    assert ended == {bad: ("error", DamagedFile), good: ("length", type(None))}


def test_more_sequences_than_allowed_take_turns_and_none_starves() -> None:
    engine, model = engine_of(max_sequences=2)
    numbers = [engine.add([n], GREEDY.replaced(max_tokens=2)) for n in range(5)]
    result = run_all(engine)
    assert {n: len(result[n][0]) for n in numbers} == dict.fromkeys(numbers, 2)
    assert max(map(len, model.batches)) == 2


def test_an_aborted_sequence_is_gone() -> None:
    engine, _ = engine_of()
    number = engine.add([1], GREEDY)
    engine.step()
    delta = engine.abort(number)
    assert delta is not None
    assert delta.finish_reason == "abort"
    assert engine.abort(number) is None
    assert engine.is_idle
    assert engine.step() == []


def test_a_result_does_not_depend_on_batch_mates() -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=8)
    alone, _ = engine_of()
    number = alone.add([1, 2], sampling)
    expected = run_all(alone)[number]
    together, _ = engine_of(max_rows=3)
    for n in range(4):
        together.add([n] * 7, SamplingParams(seed=n, max_tokens=5))
    number = together.add([1, 2], sampling)
    assert run_all(together)[number] == expected


@pytest.mark.parametrize(
    ("ids", "error", "says"),
    [
        ([], RequestError, "empty"),
        ([VOCAB], RequestError, f"token id {VOCAB} is not in"),
        ([-1], RequestError, "not in the vocabulary"),
        ([1.5], RequestError, "not 1.5"),
        ([True], RequestError, "not True"),
        (["a"], RequestError, "not 'a'"),
        ([0] * 40, ContextTooLong, "has 40 tokens and the model holds 40"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_computed(
    ids: list[int], error: type[Exception], says: str
) -> None:
    engine, model = engine_of()
    with pytest.raises(error, match=says):
        engine.add(ids, GREEDY)
    assert engine.is_idle
    assert model.batches == []


def test_logits_of_every_position_in_chunks() -> None:
    engine, model = engine_of(max_rows=3)
    out = engine.logits(range(8))
    assert out.argmax(-1).tolist() == list(range(1, 9))
    assert model.batches == [[3], [3], [2]]


def test_no_more_sequences_have_begun_than_may() -> None:
    """A prompt of one token does not pass a long one that is half read."""
    model = Counting()
    engine = Engine(model, StepLimits(max_sequences=1, max_rows=2), Spans())
    long = engine.add([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    engine.add([1], SamplingParams(max_tokens=2, ignore_eos=True))
    ended = []
    while not engine.is_idle:
        for delta in engine.step():
            if delta.finish_reason:
                ended.append(delta.number)
        begun = [s for s in engine._scheduler._live.values() if s.state.position > 0]
        assert len(begun) <= 1
    assert ended[0] == long
