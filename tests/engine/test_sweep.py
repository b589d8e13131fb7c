"""Many sequences in one pass: a model whose routes are chosen, and tiny models in every mixture."""

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback import LLM, Request
from finback.answer import Completion
from finback.config import SamplingParams
from finback.engine.engine import Engine
from finback.engine.scheduler import PATIENCE, StepLimits
from finback.errors import ContextTooLong, DamagedFile, RequestError
from finback.kernels.library import instruction_sets
from finback.models.base import ModelShape, TokenBatch
from finback.spans import Spans
from finback.storage.cache import ExpertCache
from tests.conftest import DATA, EXAMPLES, TINY
from tests.engine.test_engine import GREEDY, Counting, engine_of
from tests.storage.test_cache import BYTES, EXPERTS, LAYERS, file, make

__all__ = ["file"]  # a fixture

needs_native = pytest.mark.skipif(
    not instruction_sets(), reason="needs the native library: install a C compiler and reinstall"
)
VOCAB = 1000
PROMPTS = ("The whale", "A ship on the sea and the wind", "x", "Call me", "There once was a man")


class Routed:
    """Each token chooses experts by a given rule; the next token is the last one plus one."""

    shape = ModelShape(LAYERS, 1, VOCAB, 400, (), EXPERTS, 2, 0, 0, 0, 0, 0, 0, 0)

    def __init__(self, experts: ExpertCache, route: Callable[[int, int], set[int]]) -> None:
        self.experts, self.route, self.unions = experts, route, 0

    def forward(self, tokens: TokenBatch) -> np.ndarray:
        for layer in range(LAYERS):
            union = sorted(set().union(*(self.route(int(t), layer) for t in tokens.ids)))
            self.unions += len(union)
            with self.experts.lease(layer, union, in_order=len(union) > 3) as batches:
                assert sorted(e for ready in batches for e in ready) == union
        for run in tokens.runs:
            run.state.enter(0, lambda _: np.zeros(1))  # type: ignore[arg-type,return-value]
        out = np.zeros((len(tokens.wanted), VOCAB), np.float32)
        out[np.arange(len(out)), (tokens.ids[tokens.wanted] + 1) % VOCAB] = 9
        return out

    def logits(self, rows: np.ndarray, at_once: int) -> Generator[np.ndarray]:
        yield from np.array_split(rows, max(1, len(rows) // at_once + 1)) if len(rows) else ()


ROUTES: dict[str, Callable[[int, int], set[int]]] = {
    "all the same": lambda token, layer: {layer % EXPERTS, 5},
    "all different": lambda token, layer: {token % EXPERTS},
    "in turn": lambda token, layer: {0, 1} if (token + layer) % 2 else {4, 5},
    "everything": lambda token, layer: set(range(EXPERTS)),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("slots", [1, 3, LAYERS * EXPERTS])
def test_each_expert_of_a_step_is_read_once(file: Path, route: str, slots: int) -> None:
    """With one slot nothing is there from before, so bytes are those of the unions."""
    model = Routed(make(file, slots, guesses=False), ROUTES[route])
    engine = Engine(model, StepLimits(max_rows=16, max_sequences=5), model.experts._spans)
    numbers = [
        engine.add([100 * n + 7] * (1 + n % 4), GREEDY.replaced(max_tokens=6)) for n in range(7)
    ]
    answers: dict[int, list[int]] = {number: [] for number in numbers}
    while not engine.is_idle:
        for delta in engine.step():
            answers[delta.number] += delta.token_ids
        engine.check()
        model.experts.check()
    assert [len(answers[number]) for number in numbers] == [6] * 7
    counts = model.experts._spans.counts
    read, used = counts["bytes_read_expert"] // BYTES, counts["expert_hits"]
    assert read + used == model.unions
    if slots == 1:
        assert read >= model.unions - LAYERS * counts["steps"]  # the last of a step may stay
    if slots == LAYERS * EXPERTS:
        assert read <= LAYERS * EXPERTS
    model.experts._reader.close()


@settings(max_examples=5 * EXAMPLES)
@given(
    kills=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=6),
    slots=st.integers(1, 9),
    rows=st.integers(1, 9),
)
def test_dropping_sequences_at_any_step_leaves_nothing_behind(
    file: Path, kills: list[tuple[int, int]], slots: int, rows: int
) -> None:
    model = Routed(make(file, slots), ROUTES["in turn"])
    engine = Engine(model, StepLimits(max_rows=rows, max_sequences=3), model.experts._spans)
    numbers = [engine.add([n] * (n + 1), GREEDY.replaced(max_tokens=3)) for n in range(7)]
    step = 0
    while not engine.is_idle:
        for number, at in kills:
            if at == step:
                engine.abort(numbers[number])
        engine.step()
        engine.check()
        step += 1
        assert step < 500
    model.experts.check()
    model.experts._reader.close()


def test_interactive_answers_go_before_the_background_which_is_not_starved() -> None:
    engine, model = engine_of(max_rows=1, max_sequences=8)
    behind = engine.add([1], GREEDY.replaced(max_tokens=30), is_background=True)
    first: dict[int, int] = {}
    for step in range(3 * PATIENCE):
        engine.add([40], GREEDY.replaced(max_tokens=1))  # there is always somebody waiting
        for delta in engine.step():
            first.setdefault(delta.number, step)
        engine.check()
    assert PATIENCE <= first[behind] <= PATIENCE + 2
    assert model.batches[0] == [1]


def test_the_background_leaves_a_place_to_others() -> None:
    engine, model = engine_of(max_rows=8, max_sequences=4)
    for n in range(6):
        engine.add([n], GREEDY.replaced(max_tokens=20), is_background=True)
    engine.step()
    engine.step()
    assert model.batches == [[1, 1, 1]] * 2
    number = engine.add([30], GREEDY.replaced(max_tokens=2))
    assert number in [delta.number for delta in engine.step()]


def test_a_long_prompt_takes_few_rows_where_an_answer_waits() -> None:
    engine, model = engine_of(max_rows=16, prompt_rows=3)
    engine.add([1], GREEDY.replaced(max_tokens=5))
    engine.step()
    engine.add([2] * 10, GREEDY.replaced(max_tokens=1))
    for _ in range(4):
        engine.step()
    assert model.batches == [[1], *([[1, 3]] * 3), [1, 1]]
    background, quick = engine_of(max_rows=16, prompt_rows=3)
    background.add([1], GREEDY.replaced(max_tokens=5), is_background=True)
    background.step()
    background.add([2] * 10, GREEDY.replaced(max_tokens=1))
    background.step()
    assert sorted(quick.batches[1]) == [1, 10]


@pytest.mark.parametrize(("extra", "gets"), [(-1, 1), (0, None), (1, None)])
def test_the_context_is_the_limit(extra: int, gets: int | None) -> None:
    engine, _ = engine_of(context=20)
    ids = [1] * (20 + extra)
    if gets is None:
        with pytest.raises(ContextTooLong, match="20"):
            engine.add(ids, GREEDY)
        return
    engine.add(ids, GREEDY.replaced(max_tokens=1000))
    (delta,) = engine.step()
    assert (len(delta.token_ids), delta.finish_reason) == (gets, "length")


def test_only_wanted_rows_reach_the_head() -> None:
    engine, model = engine_of(max_rows=4)
    wanted = []
    forward = model.forward
    model.forward = lambda tokens: (wanted.append(len(tokens.wanted)), forward(tokens))[1]  # type: ignore[method-assign,func-returns-value]
    engine.add([1] * 9, GREEDY.replaced(max_tokens=2))
    while not engine.is_idle:
        engine.step()
    assert wanted == [0, 0, 1, 1]


def test_texts_are_rated_from_where_it_was_asked() -> None:
    engine, model = engine_of(max_rows=6)
    whole = engine.add_text([1, 2, 3, 9], 1)
    part = engine.add_text([5, 6, 7, 7], 3, top=2)
    long = engine.add_text(list(range(12)), 4)
    rated: dict[int, list[Any]] = {whole: [], part: [], long: []}
    while not engine.is_idle:
        for delta in engine.step():
            rated[delta.number] += delta.rated_prompt
        engine.check()
    assert [(t.token_id, t.rank) for t in rated[whole]] == [(2, 1), (3, 1), (9, 10)]
    (last,) = rated[part]
    assert (last.token_id, last.rank, last.top[0][0]) == (7, 9, 8)
    assert [t.token_id for t in rated[long]] == list(range(4, 12))
    assert model.batches[0] == [3, 3]  # the last token of a text is never computed
    for ids, start in (([1], 1), ([1, 2], 2), ([], 1)):
        with pytest.raises(RequestError):
            engine.add_text(ids, start)
    assert engine.is_idle


class Broken(Counting):
    """Gives no numbers after one token."""

    def forward(self, tokens: TokenBatch) -> np.ndarray:
        out = super().forward(tokens)
        out[tokens.ids[tokens.wanted] == 13] = np.nan
        return out


def test_a_text_whose_likelihoods_are_no_numbers_fails_alone() -> None:
    engine = Engine(Broken(), StepLimits(), Spans())
    bad, good = engine.add_text([12, 13, 14, 15], 1), engine.add_text([1, 2, 3], 1)
    ended = {delta.number: delta for delta in engine.step()}
    assert isinstance(ended[bad].error, DamagedFile)
    assert ended[good].finish_reason == "length"
    assert engine.is_idle


@pytest.fixture(scope="module", params=TINY)
def alone(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What each prompt gives on its own, and how its answer is rated."""
    folder = DATA / str(request.param)
    with LLM(folder) as llm:
        answers = {}
        for seed, prompt in enumerate(PROMPTS):
            answers[prompt] = llm.generate(prompt, max_tokens=9, seed=seed, logprobs=2)
        scores = {
            prompt: llm.score([prompt], [answer.token_ids])[0].tokens
            for prompt, answer in answers.items()
        }
    return {"folder": folder, "answers": answers, "scores": scores}


def test_an_answer_is_rated_as_it_was_written(alone: dict[str, Any]) -> None:
    for prompt, answer in alone["answers"].items():
        plain = [(t.token_id, t.logprob, t.rank) for t in answer.logprobs]
        assert plain == [(t.token_id, t.logprob, t.rank) for t in alone["scores"][prompt]]


@needs_native
@settings(max_examples=EXAMPLES)
@given(
    order=st.permutations(range(len(PROMPTS))),
    rows=st.integers(1, 40),
    places=st.integers(1, 6),
    slots=st.sampled_from([1, 3, 17, None]),
    threads=st.integers(1, 2),
    streamed=st.booleans(),
)
def test_the_same_text_and_likelihoods_whatever_the_company(
    alone: dict[str, Any],
    order: list[int],
    rows: int,
    places: int,
    slots: int | None,
    threads: int,
    streamed: bool,
) -> None:
    options: dict[str, Any] = {
        "max_rows": rows,
        "max_sequences": places,
        "expert_slots": slots,
        "threads": threads,
        "stream_spine": streamed,
    }
    with LLM(alone["folder"], **options) as llm:
        requests = [
            Request(
                prompt=PROMPTS[n],
                sampling={"max_tokens": 9, "seed": n, "logprobs": 2, "prompt_logprobs": 0},
            )
            for n in order
        ]
        done = dict(llm.batch(requests))
        for place, n in enumerate(order):
            expected: Completion = alone["answers"][PROMPTS[n]]
            assert done[place].token_ids == expected.token_ids
            assert done[place].text == expected.text
            assert done[place].logprobs == expected.logprobs
        texts = [PROMPTS[n] for n in order]
        scores = llm.score(texts, [alone["answers"][text].token_ids for text in texts])
        assert [s.tokens for s in scores] == [alone["scores"][text] for text in texts]
        llm.engine.check()
        llm._loaded.experts.check()


def test_one_bad_request_of_several_is_named_before_anything_runs(alone: dict[str, Any]) -> None:
    with LLM(alone["folder"]) as llm:
        with pytest.raises(RequestError, match="request 2: the prompt is empty"):
            llm.generate(["a", ""])
        with pytest.raises(RequestError, match="pair|text 2"):
            llm.score(["a", "b"], ["c", ""])
        with pytest.raises(RequestError, match="give pairs"):
            llm.score(["a"], [])
        with pytest.raises(RequestError, match="logit_bias: token id 1000000 is not in"):
            llm.generate("a", logit_bias={10**6: 1.0})
        assert llm.engine.is_idle
        assert llm.score([], []) == []


def test_leaving_a_batch_early_drops_the_rest(alone: dict[str, Any]) -> None:
    with LLM(alone["folder"]) as llm:
        requests = [Request(prompt="x", sampling={"max_tokens": n}) for n in (2, 50, 60)]
        batch = llm.batch(requests)
        assert next(batch)[0] == 0
        batch.close()  # type: ignore[attr-defined]
        assert llm.engine.is_idle


def test_a_prompt_of_many_tokens_reads_each_expert_once(alone: dict[str, Any]) -> None:
    with LLM(alone["folder"], expert_slots=2, max_rows=512) as llm:
        before = llm.spans.snapshot()
        ids = np.random.default_rng(1).integers(0, 500, 400).tolist()
        llm.generate(ids, max_tokens=1, temperature=0)
        spent = llm.spans.since(before)
        shape = llm.engine.model.shape
        assert spent.counts["steps"] == 1
        assert spent.counts["expert_misses"] <= shape.num_experts * len(shape.routed_layers)


def test_several_callers_take_steps_for_each_other(alone: dict[str, Any]) -> None:
    with LLM(alone["folder"], max_rows=8) as llm:
        texts = [(PROMPTS[n], alone["answers"][PROMPTS[n]].token_ids) for n in range(4)]
        scores = llm.score_each([a for a, _ in texts], [b for _, b in texts])
        requests = [Request(prompt="x", sampling={"max_tokens": n, "seed": 1}) for n in (2, 9)]
        batch = llm.batch(requests)
        found = {}
        for place, score in scores:
            found[place] = score
            llm.generate("y", max_tokens=3)
            next(batch, None)
        assert len(list(batch)) == 0 or llm.engine.is_idle
        assert [found[n].tokens for n in range(4)] == [alone["scores"][a] for a, _ in texts]
        second = llm.batch(requests)
        first = next(second)
        llm.generate("y", max_tokens=30)  # ends the other one too
        (last,) = list(second)
        assert [first[0], last[0]] == [0, 1]
        assert len(last[1].token_ids) == 9
        assert llm.engine.is_idle


def test_what_nobody_holds_is_dropped(alone: dict[str, Any]) -> None:
    with LLM(alone["folder"]) as llm:
        llm.engine.add([1, 2, 3], SamplingParams(max_tokens=500))  # Ctrl-C before it was noted
        llm.generate("x", max_tokens=2)
        assert llm.engine.is_idle


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # when freed
@settings(max_examples=4 * EXAMPLES)
@given(at=st.integers(0, 2500), slots=st.sampled_from([1, 3, 9]), seed=st.integers(0, 3))
def test_ctrl_c_at_any_line_leaves_a_model_that_works(at: int, slots: int, seed: int) -> None:
    """Interrupts at a random call of our own code; then everything is as if new."""
    folder = DATA / "tiny-k3"
    with LLM(folder, expert_slots=slots, threads=1) as llm:
        expected = llm.generate("x", max_tokens=3, seed=seed).token_ids
        left = [at]

        def interrupt(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and "/finback/" in frame.f_code.co_filename:
                left[0] -= 1
                if left[0] == 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            llm.generate(["x", "The whale"], max_tokens=3, seed=seed)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert llm.generate("x", max_tokens=3, seed=seed).token_ids == expected
        llm.engine.check()
        llm._loaded.experts.check()
        assert llm.engine.is_idle


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.logprobs(5),
        lambda llm: llm.logprobs(None),
        lambda llm: llm.score(5, 6),
        lambda llm: llm.score("ab", "cd"),
        lambda llm: llm.logits(5),
        lambda llm: llm.tokenize(5),
        lambda llm: llm.batch([5]),
        lambda llm: llm.batch(Request(prompt="a")),
        lambda llm: llm.batch([Request(prompt="a", sampling=5)]),  # type: ignore[arg-type]
        lambda llm: llm.batch([Request()]),
        lambda llm: llm.generate("a", logprobs=21),
        lambda llm: llm.generate("a", stop=5),
    ],
)
def test_odd_types_are_refused_in_a_sentence(
    alone: dict[str, Any], call: Callable[[LLM], object]
) -> None:
    with LLM(alone["folder"]) as llm, pytest.raises(RequestError):
        call(llm)
