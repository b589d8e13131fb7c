"""Drafts change how many passes an answer takes, and nothing else."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback import LLM, Completion
from finback.config import SamplingParams
from finback.engine.drafts import MOST, DraftController, ModelDrafter, PromptLookup, chance_after
from finback.engine.engine import Engine
from finback.engine.scheduler import StepLimits
from finback.errors import UsageError
from finback.models.base import Run, TokenBatch
from finback.models.state import SequenceState
from finback.spans import Spans
from finback.storage.arena import MemoryPool
from tests.conftest import DATA, EXAMPLES, TINY
from tests.engine.test_engine import Counting
from tests.helpers import extend, load_all, logits_of


def test_what_followed_before_is_proposed() -> None:
    lookup, tokens = PromptLookup(), [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert lookup.propose(tokens, 4) == [4, 5, 9, 1]
    tokens += [4, 7]
    assert lookup.propose(tokens, 4) == []
    tokens += [2, 3, 4]
    assert lookup.propose(tokens, 2) == [7, 2]  # what came last
    assert PromptLookup().propose([1, 2], 3) == []
    assert PromptLookup().propose([1, 1, 1, 1], 3) == [1]


def test_drafts_are_made_while_they_pay() -> None:
    controller = DraftController(share=1 / 7)
    assert controller.width(1, 0.99) == 0  # nothing is known of steps without
    controller.note(1, 0, 0, 1.0)
    assert controller.width(1, 0.97) == MOST
    assert controller.width(1, 0.5) == 0
    for _ in range(20):
        controller.note(1, 2, 2, 1.1)  # a draft costs next to nothing
    assert controller.width(1, 0.5) > 2
    for _ in range(20):
        controller.note(1, 2, 2, 2.9)  # as much as a token
    assert controller.width(1, 0.7) == 0
    assert DraftController(share=16 / 896).width(1, 0.9) == 0


def test_what_drafts_may_lose_is_bounded() -> None:
    controller = DraftController(share=1 / 7)
    for _ in range(500):
        controller.note(1, 0, 0, 1.0)
    lost = 0.0
    for _ in range(500):
        width = controller.width(1, 0.99)  # however sure they look
        controller.note(1, width, 0, 1.0 + 0.1 * width)
        lost += width * 0.1
    assert 0 < lost < 0.02 * 1000 + 3


def test_chances_are_learnt_from_what_was_tried() -> None:
    assert chance_after(0.6, 4, 4) > 0.6
    assert chance_after(0.6, 4, 0) < 0.6
    assert chance_after(0.6, 0, 0) == 0.6


class Always(DraftController):
    """Drafts as many as it is told."""

    def __init__(self, most: int) -> None:
        super().__init__(share=0.5)
        self._most = most

    def width(self, certain: int, chance: float, most: int = 16) -> int:
        return self._most


class Chosen(PromptLookup):
    """Proposes right or wrong tokens as it is told, for a model that counts upwards."""

    def __init__(self, wrong_at: Sequence[int]) -> None:
        self._wrong = list(wrong_at)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        wrong = self._wrong.pop(0) if self._wrong else 99
        return [(tokens[-1] + 1 + n + (n >= wrong)) % 50 for n in range(most)]


@given(
    wrong_at=st.lists(st.integers(0, 5), max_size=20),
    width=st.integers(0, 5),
    rows=st.integers(1, 9),
    length=st.integers(1, 25),
    stop=st.sampled_from([None, 9, 20]),
)
def test_any_drafts_give_the_same_tokens(
    wrong_at: list[int], width: int, rows: int, length: int, stop: int | None
) -> None:
    results = []
    for most in (0, width):
        model = Counting()
        engine = Engine(model, StepLimits(max_rows=rows), Spans(), () if stop is None else (stop,))
        engine.drafts = Always(most) if most else None
        sampling = SamplingParams(temperature=0, max_tokens=length)
        numbers = [engine.add([n, n + 1, n + 2], sampling) for n in (3, 15)]
        for sequence in engine._scheduler._live.values():
            sequence.drafter = Chosen(wrong_at)
        got: dict[int, tuple[list[int], Any]] = {number: ([], None) for number in numbers}
        while not engine.is_idle:
            for delta in engine.step():
                before = got[delta.number][0]
                got[delta.number] = (before + delta.token_ids, delta.finish_reason)
            engine.check()
        results.append((list(got.values()), len(model.batches)))
    assert results[0][0] == results[1][0]
    assert results[1][1] <= results[0][1]


@pytest.mark.parametrize("stood", range(5))
def test_going_back_is_as_if_it_had_not_been(tiny: Path, stood: int) -> None:
    """Four drafts, of which some stand; then the same tokens as without."""
    model = load_all(tiny).model
    prompt, drafts, rest = [5, 6, 7, 8, 9, 3, 2], [11, 12, 13, 14], [20, 21]
    plain = SequenceState()
    for ids in (prompt, drafts[:stood], rest, [30]):
        if ids:
            expected = extend(model, plain, ids)
    state = SequenceState()
    extend(model, state, prompt)
    for more in (drafts, drafts[::-1]):  # twice, so that some pend from before
        ids = np.array(more, np.int64)
        run = Run(state, 0, len(ids), held=len(ids))
        logits_of(model, TokenBatch(ids, (run,), np.arange(len(ids))))
        state.position += len(ids)
        state.go_back(len(prompt) + stood)  # of the second four none stand
    for ids in (rest, [30]):
        got = extend(model, state, ids)
    np.testing.assert_array_equal(got, expected)
    assert state.num_bytes >= plain.num_bytes
    assert state.position == plain.position


@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, 50),
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
    width=st.integers(1, 16),
    slots=st.sampled_from([1, None]),
    name=st.sampled_from(TINY),
)
def test_the_same_text_with_and_without_drafts(
    seed: int, temperature: float, width: int, slots: int | None, name: str
) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "seed": seed, "temperature": temperature}
    prompt = "the sea the sea the sea and the ship the sea and the"
    with LLM(DATA / name, expert_slots=slots) as llm:
        alone = llm.generate(prompt, logprobs=1, **options)
        schema = llm.generate(prompt, json_schema={"type": "array"}, **options)
        llm.engine.drafts = Always(width)
        drafted = llm.generate(prompt, logprobs=1, **options)
        assert (drafted.token_ids, drafted.text) == (alone.token_ids, alone.text)
        assert drafted.logprobs == alone.logprobs
        assert drafted.finish_reason == alone.finish_reason
        again = llm.generate([prompt, "x", prompt], **options)
        assert again[2].token_ids == alone.token_ids
        held = llm.generate(prompt, json_schema={"type": "array"}, **options)
        assert held.token_ids == schema.token_ids
        llm.engine.check()


def test_drafts_that_stand_save_passes() -> None:
    with LLM(drafts="lookup") as llm:
        text = "The old man went down to the sea. " * 6
        start = llm.spans.snapshot()
        out = llm.generate(text, max_tokens=40, temperature=0, repetition_penalty=1.0)
        counts = llm.spans.since(start).counts
    with LLM() as llm:
        assert llm.generate(text, max_tokens=40, temperature=0).token_ids == out.token_ids
    assert counts["drafts_stood"] <= counts["drafts"]
    assert counts["steps"] + counts["drafts_stood"] == 40


@pytest.mark.parametrize("name", TINY)
def test_drafts_of_many_sequences_in_one_step(name: str) -> None:
    """More rows than a layer takes together, so that a cut falls among drafts."""
    options: dict[str, Any] = {"max_tokens": 12, "seed": 3, "ignore_eos": True}
    prompts = ["the sea the sea the sea and the" + " ship" * (n % 3) for n in range(60)]
    with LLM(DATA / name) as llm:
        alone = [llm.generate(prompt, **options).token_ids for prompt in prompts[:3]]
    with LLM(DATA / name, max_rows=2000, max_sequences=60) as llm:
        llm.engine.drafts = Always(8)
        found = llm.generate(prompts, **options)
    for number, one in enumerate(found):
        assert one.token_ids == alone[number % 3]


class Holding:
    """A constraint: after 4 must come 20 and 9, else anything."""

    def allowed(self) -> np.ndarray:
        return np.ones(50, bool)

    def accept(self, token: int) -> bool:
        self._last = token
        return False

    def forced(self) -> list[int]:
        return [20, 9] if self._last == 4 else []


@pytest.mark.parametrize("drafts", [[30, 31, 9], [30, 20, 9], [4, 20, 9, 10], [4, 5, 6], [4, 20]])
def test_drafts_before_forced_tokens_that_differ_are_in_vain(drafts: list[int]) -> None:
    class Fixed(PromptLookup):
        def propose(self, tokens: Sequence[int], most: int) -> list[int]:
            return list(drafts[:most])

    results = []
    for most in (0, 4):
        engine = Engine(Counting(), StepLimits(), Spans())
        engine.drafts = Always(most) if most else None
        number = engine.add([2, 3], SamplingParams(temperature=0, max_tokens=8), Holding())
        for sequence in engine._scheduler._live.values():
            sequence.drafter = Fixed()
            sequence.state.position = 1  # so that the first step drafts already
        tokens: list[int] = []
        while not engine.is_idle:
            for delta in engine.step():
                assert delta.number == number
                tokens += delta.token_ids
        results.append(tokens)
    assert results[0] == results[1]


def test_an_error_keeps_what_had_been_accepted() -> None:
    class Broken(Counting):
        def forward(self, tokens: TokenBatch) -> np.ndarray:
            out = super().forward(tokens)
            out[tokens.ids[tokens.wanted] == 7] = np.nan
            return out

    for most in (0, 4):
        engine = Engine(Broken(), StepLimits(), Spans())
        engine.drafts = Always(most) if most else None
        engine.add([2, 3], SamplingParams(temperature=0, max_tokens=9))
        for sequence in engine._scheduler._live.values():
            sequence.drafter = Chosen([])
        deltas = []
        while not engine.is_idle:
            deltas += engine.step()
        assert [t for delta in deltas for t in delta.token_ids] == [4, 5, 6, 7]
        assert deltas[-1].finish_reason == "error"


@pytest.mark.parametrize("drafts", ["off", "lookup"])
def test_tokens_end_where_a_stop_string_was_met(drafts: str) -> None:
    text = "the sea the sea the sea and the ship the sea and the"
    options: dict[str, Any] = {"max_tokens": 40, "seed": 5, "logprobs": 0}
    with LLM(DATA / "tiny-k3") as llm:
        whole = llm.generate(text, **options)
        stop = whole.text[6:9]
        expected = llm.generate(text, stop=stop, **options)
    with LLM(DATA / "tiny-k3") as llm:
        if drafts == "lookup":
            llm.engine.drafts = Always(8)
        stream_out = Completion()
        stream = llm.stream(text, stream_out, stop=(stop,), **options)
        next(stream)
        llm.generate("x", max_tokens=50)  # steps for both
        list(stream)
        for out in (llm.generate(text, stop=stop, **options), stream_out):
            assert out.token_ids == expected.token_ids
            assert out.logprobs == expected.logprobs
            assert len(out.logprobs) == len(out.token_ids) == out.stats.tokens


def test_the_memory_plan_knows_drafts() -> None:
    with LLM(DATA / "tiny-k3", max_sequences=2) as plain:
        before = plain.plan.parts["states"]
    with LLM(DATA / "tiny-k3", max_sequences=2, drafts="lookup") as llm:
        shape = llm.engine.model.shape
        assert llm.plan.parts["states"] - before == 2 * MOST * shape.draft_bytes
        llm.engine.drafts = Always(8)
        llm.engine.add(llm.tokenize("the sea the sea the sea"), SamplingParams(max_tokens=20))
        (sequence,) = llm.engine._scheduler._live.values()
        while not llm.engine.is_idle:
            llm.engine.step()
            latent = sequence.state.position * shape.state_bytes_per_token
            pending = sequence.state.num_bytes - shape.state_bytes - 2 * latent
            assert pending <= MOST * shape.draft_bytes + 64 * shape.state_bytes_per_token


def test_a_fork_goes_its_own_way(tiny: Path) -> None:
    model = load_all(tiny).model
    state = SequenceState()
    extend(model, state, [5, 6, 7])
    other = state.fork()
    extend(model, other, [1, 2, 3])
    got = extend(model, state, [8, 9])
    plain = SequenceState()
    np.testing.assert_array_equal(extend(model, plain, [5, 6, 7, 8, 9])[3:], got)
    assert (state.position, other.position) == (5, 6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_drafts_for_itself_and_every_draft_stands(
    tiny: Path, tmp_path: Path, temperature: float
) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "seed": 8, "temperature": temperature}
    with LLM(tiny) as llm:
        expected = llm.generate("The whale", ignore_eos=True, **options)
    with LLM(tiny, drafts=str(tiny)) as llm:
        assert llm.plan.parts["drafts"] > 0
        llm.engine.drafts = Always(4)
        out = llm.generate("The whale", ignore_eos=True, **options)
        assert out.token_ids == expected.token_ids
        counts = llm.spans.counts
        assert counts["drafts_stood"] == counts["drafts"] > 20
        assert counts["steps"] <= 8
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    if "added_tokens_decoder" in config:
        name = next(iter(config["added_tokens_decoder"]))
        config["added_tokens_decoder"][name]["content"] = "<|other|>"
        (other / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match="has another vocabulary"):
            LLM(tiny, drafts=str(other))


def test_models_of_one_vocabulary_draft_for_each_other() -> None:
    """Both tiny models have the same tokens; what one guesses of the other is mostly wrong."""
    options: dict[str, Any] = {"max_tokens": 20, "seed": 8, "ignore_eos": True}
    first, second = DATA / TINY[0], DATA / TINY[1]
    with LLM(first) as llm:
        alone = llm.generate(["The whale", "A ship"], **options)
    with LLM(first, drafts=str(second)) as llm:
        llm.engine.drafts = Always(3)
        drafted = llm.generate(["The whale", "A ship"], **options)
    assert [a.token_ids for a in alone] == [b.token_ids for b in drafted]


def test_a_small_model_may_be_asked_twice(tiny: Path) -> None:
    drafter = ModelDrafter(load_all(tiny).model, SamplingParams(temperature=0), 1, MemoryPool())
    assert drafter.propose([1, 2, 3], 4) == drafter.propose([1, 2, 3], 4)
    assert len(drafter.propose([1, 2, 3], 2)) == 2


@pytest.mark.parametrize("share", [0.0, 1 / 56, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("certain", [1, 6, 64, 500])
def test_prices_are_numbers_for_every_model(share: float, certain: int) -> None:
    controller = DraftController(share)
    for _ in range(5):
        controller.note(certain, 0, 0, 1.0)
        width = controller.width(certain, 0.99)
        controller.note(certain, width, width // 2, 1.2)
        assert 0 <= width <= MOST
