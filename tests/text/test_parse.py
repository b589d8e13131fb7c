"""What is rendered is read back, and a model's slips are forgiven."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.text.chat import ChatOptions, XtmlChat
from finback.text.parse import ParsedMessage, XtmlParser, parse_answer
from finback.text.tokenizer import load_tokenizer
from finback.text.xtml import render
from tests.conftest import DATA
from tests.text.test_xtml import call, published_cases

tokenizer = load_tokenizer(DATA / "tiny-k3")


def answer_ids(message: dict[str, Any], thinking: bool = True) -> list[int]:
    """Render an assistant message and give the ids after the prompt that opens it."""
    chat = XtmlChat(tokenizer)
    prompt = chat.encode([], ChatOptions(thinking=thinking))
    ids: list[int] = []
    for text, is_special in render([message], thinking=thinking, add_generation_prompt=False):
        ids += tokenizer.encode(text, allow_special=is_special)
    assert ids[: len(prompt)] == prompt
    return ids[len(prompt) :]


def read(ids: list[int], thinking: bool = True) -> ParsedMessage:
    return parse_answer(XtmlParser(tokenizer, "think" if thinking else "response"), ids)


# Any text but lone surrogates, which have no UTF-8.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(
    reasoning=texts,
    content=texts,
    calls=st.lists(
        st.tuples(
            texts.filter(bool),
            st.dictionaries(texts.filter(lambda k: k == k.strip()), values, max_size=3),
        ),
        max_size=3,
    ),
    thinking=st.booleans(),
)
def test_every_rendered_answer_is_read_back(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], thinking: bool
) -> None:
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [call(arguments, name) for name, arguments in calls],
    }
    got = read(answer_ids(message, thinking), thinking)
    assert got.content == content
    assert got.reasoning == (reasoning if thinking and reasoning.strip() else "")
    assert [(c.name, json.loads(c.arguments)) for c in got.tool_calls] == calls


@pytest.mark.skipif(
    not published_cases(), reason="the published cases are not part of this repository (../shared)"
)
def test_assistant_turns_of_the_published_cases_are_read_back() -> None:
    count = 0
    for case in published_cases():
        for message in case["input"]["messages"]:
            if message["role"] != "assistant" or case["input"].get("thinking", True) is False:
                continue
            got = read(answer_ids({k: v for k, v in message.items() if k != "name"}))
            assert got.content == (message["content"] or "")
            assert got.reasoning == (
                message.get("reasoning_content") or message.get("reasoning") or ""
            )
            for mine, theirs in zip(got.tool_calls, message.get("tool_calls", []), strict=True):
                assert mine.name == theirs["function"]["name"]
            count += 1
    assert count > 8


def ids_of(*parts: str | tuple[str]) -> list[int]:
    """Encode ordinary strings, and special ones given in one-element tuples."""
    out: list[int] = []
    for part in parts:
        out += tokenizer.encode(part) if isinstance(part, str) else [tokenizer.specials[part[0]]]
    return out


OPEN, CLOSE, SEP, END = ("<|open|>",), ("<|close|>",), ("<|sep|>",), ("<|end_of_msg|>",)
CALL_F = (OPEN, "tools", SEP, OPEN, 'call tool="f"', SEP)


@pytest.mark.parametrize(
    ("parts", "reasoning", "content", "calls"),
    [
        (("hm",), "hm", "", []),
        (("hm", OPEN, "response", SEP, "yes"), "hm", "yes", []),  # think never closed
        (("hm", CLOSE, "think", SEP, OPEN, "response", SEP, "yes", END, "more"), "hm", "yes", []),
        ((CLOSE, "think", SEP, "stray", OPEN, "response", SEP, "yes"), "", "yes", []),
        ((CLOSE, "nothing", SEP, "hm"), "hm", "", []),
        (("a <|open|> b",), "a <|open|> b", "", []),  # ordinary text that looks like structure
        ((OPEN, "tools", SEP, OPEN, 'call tool="f" index="1"', SEP), "", "", [("f", {})]),
        (
            (*CALL_F, OPEN, 'argument key="n" type="number"', SEP, "4"),
            "", "", [("f", {"n": 4})],
        ),
        (  # two calls, no closers at all
            (*CALL_F, OPEN, 'argument key="a" type="string"', SEP, "4",
             OPEN, 'argument key="b" type="number"', SEP, "oops", OPEN, 'call tool="g"', SEP),
            "", "", [("f", {"a": "4", "b": "oops"}), ("g", {})],
        ),
        (
            (OPEN, "tools", SEP, OPEN, 'call tool="a&quot;&amp;quot;"', SEP, END),
            "", "", [('a"&quot;', {})],
        ),
        ((OPEN, "unterminated"), "", "", []),
        ((SEP, "x"), "x", "", []),
    ],
)  # fmt: skip
def test_slips_are_forgiven(parts: Any, reasoning: str, content: str, calls: list[Any]) -> None:
    got = read(ids_of(*parts))
    assert (got.reasoning, got.content) == (reasoning, content)
    assert [(c.name, json.loads(c.arguments)) for c in got.tool_calls] == calls


@given(st.lists(st.integers(0, 639), max_size=60))
def test_no_ids_break_the_parser(ids: list[int]) -> None:
    read(ids)
