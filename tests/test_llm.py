"""The Python face on a tiny checkpoint with random weights."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from finback import LLM, ChatOptions, Completion
from finback.errors import CapacityError, CheckpointError, ReadError, RequestError, UsageError
from tests.conftest import DATA

TINY = DATA / "tiny-k3"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(TINY)


def test_generate_and_stream_agree(llm: LLM) -> None:
    whole = llm.generate("The whale", max_tokens=12, seed=4)
    assert "".join(llm.stream("The whale", max_tokens=12, seed=4)) == whole.text
    assert len(whole.token_ids) == 12
    assert whole.finish_reason == "length"
    assert whole.seed == 4


def test_ids_are_a_prompt_too(llm: LLM) -> None:
    ids = llm.tokenize("The whale")
    assert (
        llm.generate(ids, max_tokens=5, seed=1).token_ids
        == llm.generate("The whale", max_tokens=5, seed=1).token_ids
    )


def test_a_seed_is_chosen_and_told(llm: LLM) -> None:
    first = llm.generate("x", max_tokens=6)
    assert llm.generate("x", max_tokens=6, seed=first.seed).token_ids == first.token_ids


def test_a_stop_string_ends_a_text(llm: LLM) -> None:
    whole = llm.generate("x", max_tokens=40, seed=2)
    stop = whole.text[5:8]
    cut = llm.generate("x", max_tokens=40, seed=2, stop=(stop,))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert llm.engine.is_idle


def test_logits_of_every_position(llm: LLM) -> None:
    reference = load_file(TINY / "reference.safetensors")
    logits = llm.logits(reference["input_ids"].tolist())
    assert logits.dtype == np.float32
    assert np.abs(logits - reference["logits_f64"]).max() < 5e-3
    with LLM(TINY, activations="float32") as exact:
        logits = exact.logits(reference["input_ids"].tolist())
    assert np.abs(logits - reference["logits_f64"]).max() < 1e-3


def test_chat_gives_a_message(llm: LLM) -> None:
    question = [{"role": "user", "content": "Hello"}]
    out = llm.chat(question, ChatOptions(thinking=False), max_tokens=8, seed=1)
    assert out.message.content == out.text
    assert len(out.token_ids) == 8
    assert out.stats.prompt_tokens == len(
        llm.chat_format.encode(question, ChatOptions(thinking=False))
    )  # type: ignore[union-attr]


def test_figures_add_up(llm: LLM) -> None:
    stats = llm.generate("x", max_tokens=10, seed=1).stats
    assert stats.tokens == 10
    assert stats.compute_s + stats.read_s <= stats.prompt_s + stats.decode_s
    fresh = LLM(TINY, expert_slots=1).generate("x", max_tokens=10, seed=1).stats
    # 8 routed layers, 4 of 16 experts of 9,792 bytes each; the last token is not computed.
    assert fresh.bytes_read == 10 * 8 * 4 * 9_792


def test_two_open_streams_lose_nothing(llm: LLM) -> None:
    alone = llm.generate("x", max_tokens=12, seed=1).token_ids
    for other in (4, 20):  # one that ends before, one that outlives
        first = Completion()
        stream = llm.stream("x", first, max_tokens=12, seed=1)
        next(stream)
        assert len(llm.generate("y", max_tokens=other, seed=2).token_ids) == other
        list(stream)
        assert first.token_ids == alone
    assert llm.engine.is_idle


def test_a_record_holds_one_answer(llm: LLM) -> None:
    out = Completion()
    list(llm.stream("x", out, max_tokens=2))
    with pytest.raises(RequestError, match="holds another answer"):
        llm.stream("x", out)


def test_a_closed_model_says_so_and_a_failed_load_leaks_nothing(broken: Path) -> None:
    closed = LLM(TINY, expert_slots=1)
    closed.close()
    with pytest.raises(UsageError, match="has been closed"):
        closed.generate("x")
    with pytest.raises(UsageError, match="has been closed"):
        closed.logits([1])
    (broken / "config.json").write_text((broken / "config.json").read_text().replace("386", "9386"))
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(3):
        with pytest.raises(CheckpointError, match="eos_token_id must be ids below 640"):
            LLM(broken)
    assert not before or len(os.listdir("/proc/self/fd")) <= before


def test_leaving_a_stream_early_frees_its_sequence(llm: LLM) -> None:
    stream = llm.stream("x", max_tokens=50, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.is_idle


def test_the_same_text_whatever_the_cache_and_the_rows(llm: LLM) -> None:
    expected = llm.generate("The whale and the sea", max_tokens=15, seed=9).token_ids
    with LLM(TINY, expert_slots=1, max_rows=2, threads=3) as other:
        assert other.generate("The whale and the sea", max_tokens=15, seed=9).token_ids == expected


def test_unknown_options_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="unknown option 'temprature'; choose from max_tokens"):
        llm.generate("x", temprature=1)
    with pytest.raises(UsageError, match="unknown option 'thread'"):
        LLM(TINY, thread=2)
    with pytest.raises(UsageError, match="max_rows must be"):
        LLM(TINY, max_rows=0)


def test_bad_prompts_are_refused_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.stream("")
    with pytest.raises(RequestError, match="unknown role"):
        llm.stream_chat([{"role": "x"}])


def test_a_file_that_shrinks_while_in_use_is_named(broken: Path) -> None:
    llm = LLM(broken, expert_slots=1)
    for path in broken.glob("model-0000[2-9]*"):
        with path.open("r+b") as file:
            file.truncate(200)
    with pytest.raises(ReadError, match=r"model-00002.*it shrank while in use"):
        llm.generate("x")
    assert llm.engine.is_idle


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": {"type": "function"}},
        {"response_format": "json"},
        {"tools": "abc"},
        {"tools": [{"x": object()}]},
        {"thinking_effort": 7},
    ],
)
def test_odd_chat_options_are_refused(llm: LLM, options: dict) -> None:
    with pytest.raises(RequestError):
        llm.chat([{"role": "user", "content": "x"}], ChatOptions(**options))


def test_conversations_of_other_shapes_are_refused(llm: LLM) -> None:
    for messages in ([], "hi", None):
        with pytest.raises(RequestError, match="messages must be a list"):
            llm.chat(messages)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="options must be ChatOptions"):
        llm.chat([{"role": "user", "content": "x"}], {"thinking": False})  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_is_refused_before_it_is_read() -> None:
    with pytest.raises(CapacityError, match=r"needs at least [0-9]+ MiB, the budget is 20 MiB"):
        LLM(TINY, memory="20MiB")


@pytest.mark.parametrize("prompt", [None, 5, b"ab", [None]])
def test_prompts_of_other_types_are_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt)  # type: ignore[arg-type]
