"""Memory of states goes round: used again, never by two, never more than was in use at once."""

from pathlib import Path

import numpy as np
import pytest

from finback import LLM, Request
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
