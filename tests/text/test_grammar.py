"""Answers held to a schema, an expression, a choice or a grammar; impossible ones are refused."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from finback import LLM
from finback.config import SamplingParams
from finback.errors import RequestError
from finback.text.chat import ChatOptions
from finback.text.grammar import Grammars
from finback.text.tokenizer import load_tokenizer
from tests.conftest import DATA
from tests.text.test_tokenizer import byte_level_file

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"enum": ["red", "green", 3, None]},
    {"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 9, "minimum": -9}]},
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "chat"])
def test_json_parses_and_fits_its_schema(llm: LLM, schema: dict[str, Any], raw: bool) -> None:
    ended = []
    for seed in range(6):
        options: dict[str, Any] = {"json_schema": schema, "max_tokens": 60, "seed": seed}
        if raw:
            out = llm.generate("The sea", **options)
        else:
            out = llm.chat([{"role": "user", "content": "Who?"}], **options)
        ended.append(out.finish_reason)
        if out.finish_reason == "stop":
            jsonschema.validate(json.loads(out.text), schema)
        else:
            assert out.finish_reason == "length"
    assert "stop" in ended


def test_cut_json_says_length(llm: LLM) -> None:
    out = llm.generate("x", json_schema=SCHEMAS[0], max_tokens=3, seed=1)
    assert out.finish_reason == "length"
    assert len(out.token_ids) == 3


def test_what_has_no_choice_is_not_sampled(llm: LLM) -> None:
    before = llm.spans.snapshot()
    out = llm.generate("x", json_schema=SCHEMAS[0], max_tokens=60, seed=2)
    counts = llm.spans.since(before).counts
    assert out.finish_reason == "stop"
    assert counts["forced_tokens"] >= 5
    assert counts["steps"] <= len(out.token_ids) - counts["forced_tokens"] + 1


def test_the_text_is_the_same_in_any_company(llm: LLM) -> None:
    options: dict[str, Any] = {"json_schema": SCHEMAS[0], "max_tokens": 60, "seed": 2}
    alone = llm.generate("The sea", **options)
    together = llm.generate(["A man", "The sea", "x"], **options)
    assert together[1].token_ids == alone.token_ids


@pytest.mark.parametrize("prompt", ["The sea", "x"])
def test_expressions_choices_and_grammars(llm: LLM, prompt: str) -> None:
    out = llm.generate(prompt, regex="[0-9]{3}-(ab|cd)+!", max_tokens=90, seed=3)
    assert out.finish_reason == "length" or re.fullmatch("[0-9]{3}-(ab|cd)+!", out.text)
    choices = ("yes", 'no, "never"', "möglich\nso", "yesterday")
    for seed in range(5):
        out = llm.generate(prompt, choice=choices, seed=seed)
        assert out.text in choices
        assert out.finish_reason == "stop"
    out = llm.generate(prompt, grammar='start: "a" ("b" | "c") "d"', seed=1)
    assert out.text in ("abd", "acd")


def test_stop_tokens_end_forced_stretches_too(llm: LLM) -> None:
    options: dict[str, Any] = {"json_schema": SCHEMAS[0], "seed": 2, "max_tokens": 60}
    whole = llm.generate("x", **options)
    for token in whole.token_ids[1:6]:
        cut = llm.generate("x", stop_token_ids=[token], **options)
        plain = llm.generate("x", stop_token_ids=[token], logprobs=0, **options)
        assert cut.token_ids == plain.token_ids
        assert cut.token_ids[-1] == token
        assert cut.finish_reason == "stop"
        assert cut.text == plain.text


def test_any_json_is_json(llm: LLM) -> None:
    out = llm.generate("x", json_schema=True, seed=3, max_tokens=40)
    assert out.finish_reason == "length" or json.loads(out.text) is not Ellipsis


def test_a_constraint_in_a_chat_comes_without_reasoning(llm: LLM) -> None:
    out = llm.chat(
        [{"role": "user", "content": "Yes or no?"}],
        ChatOptions(thinking=True),
        choice=["yes", "no"],
        seed=1,
    )
    assert out.message.content in ("yes", "no")
    assert not out.message.reasoning


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"json_schema": {"type": "object", "not": {}}}, "not"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 1}}, "minLength"),
        ({"json_schema": {"type": "strange"}}, "strange"),
        ({"json_schema": {"$ref": "http://example.com/schema"}}, "json_schema cannot be used"),
        ({"json_schema": '{"type": '}, "json_schema is no JSON"),
        ({"json_schema": {"type": {1, 2}}}, "json_schema is no JSON"),
        ({"json_schema": False}, "allows no answer"),
        ({"regex": "\ud800"}, "holds a character that is none"),
        ({"choice": ["a", "\ud800"]}, "holds a character that is none"),
        ({"grammar": "\ud800"}, "holds a character that is none"),
        ({"json_schema": '"\ud800"'}, "holds a character that is none"),
        ({"regex": "(a"}, "regex cannot be used"),
        ({"grammar": "start: nowhere"}, "grammar cannot be used"),
        ({"choice": []}, "at least one text"),
        ({"regex": "a", "choice": ["a"]}, "exclude each other"),
        ({"regex": 5}, "regex must be a text"),
    ],
)
def test_what_cannot_be_met_is_refused_before_anything_is_computed(
    llm: LLM, options: dict[str, Any], says: str
) -> None:
    before = llm.spans.snapshot()
    with pytest.raises(RequestError, match=re.escape(says)):
        llm.stream("x", **options)
    assert llm.spans.since(before).counts == {}


@pytest.mark.parametrize("kind", ["tiktoken", "tokenizer.json"])
def test_both_kinds_of_vocabularies(kind: str, tmp_path: Path) -> None:
    """Any token that is allowed is taken in, until what was written is complete."""
    if kind == "tokenizer.json":
        byte_level_file(tmp_path)
    tokenizer = load_tokenizer(DATA / "tiny-k3" if kind == "tiktoken" else tmp_path)
    size, rng = tokenizer.num_tokens + 7, np.random.default_rng(2)
    end = size - 1 if not tokenizer.specials else max(tokenizer.specials.values())
    for _ in range(5):
        guide = Grammars(tokenizer, size).guide(
            SamplingParams(json_schema=SCHEMAS[0]), frozenset({end})
        )
        assert guide is not None
        written: list[int] = []
        is_over = False
        while not is_over and len(written) < 200:
            ids = np.flatnonzero(guide.allowed())
            token = int(rng.choice(ids))
            is_over = guide.accept(token)
            written += [token] if token != end else []
            for forced in guide.forced() if not is_over else []:
                written.append(forced)
                is_over = guide.accept(forced)
        if is_over:
            jsonschema.validate(json.loads(tokenizer.decode(written)), SCHEMAS[0])
