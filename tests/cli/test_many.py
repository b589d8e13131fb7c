"""Several prompts, constraints, and scores, as a person or a pipe uses them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_commands import finback, run


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("The whale\n\nA ship\nx\n")
    return str(path)


def test_prompts_of_a_file_are_answered_in_their_order(prompts: str) -> None:
    done = run("--raw", "--prompt-file", prompts)
    assert done.returncode == 0
    heads = [line for line in done.stdout.splitlines() if line.startswith("==> ")]
    assert heads == ["==> 1: The whale <==", "==> 2: A ship <==", "==> 3: x <=="]
    assert "3 answers: " in done.stderr
    assert "rows in each of 6 passes" in done.stderr
    lines = run("--raw", "--prompt-file", prompts, "--json").stdout.splitlines()
    values = [json.loads(line) for line in lines]
    assert sorted(value["index"] for value in values) == [0, 1, 2]
    alone = json.loads(run("--raw", "--json", "A ship").stdout)
    (second,) = [value for value in values if value["index"] == 1]
    assert second["token_ids"] == alone["token_ids"]
    piped = run("--raw", "-q", "--prompt-file", "-", stdin="A ship\n")
    assert piped.stdout == run("--raw", "-q", "A ship").stdout
    assert piped.stderr == ""


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--prompt-file", "/nope"), "/nope: cannot be read"),
        (("--prompt-file", "-"), "holds no prompts"),
        (("--prompt-file", "-", "x"), "not both"),
        (("--json-schema", "/nope", "x"), "/nope: cannot be read"),
        (("--regex", "(a", "x"), "regex cannot be used"),
        (("--regex", "a", "--choice", "b", "x"), "exclude each other"),
    ],
)
def test_what_cannot_be_used_is_named(args: tuple[str, ...], says: str) -> None:
    done = run("--raw", *args)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_an_answer_can_be_held_to_a_schema(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}')
    done = finback("run", "--raw", "-q", "--seed", "1", "--json-schema", str(schema), "Well")
    assert done.returncode == 0, done.stderr
    assert all(isinstance(value, bool) for value in json.loads(done.stdout))
    done = finback("run", "-q", "--choice", "yes", "--choice", "no", "Is it?")
    assert done.stdout in ("yes\n", "no\n")


def test_rated_tokens_come_with_json() -> None:
    value = json.loads(run("--raw", "--json", "--logprobs", "2", "x").stdout)
    assert [token["id"] for token in value["logprobs"]] == value["token_ids"]
    assert all(len(token["top"]) == 2 and token["logprob"] <= 0 for token in value["logprobs"])


def score(lines: list[Any], *args: str) -> tuple[list[dict[str, Any]], Any]:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = finback("score", "-", *args, stdin=text)
    return [json.loads(line) for line in done.stdout.splitlines()], done


def test_texts_are_scored() -> None:
    texts = ["The sea was calm.", {"text": "Once upon a time"}]
    pair = {"prompt": "The sea", "continuation": " was blue"}
    rows, done = score([*texts, pair], "--tokens", "--top", "1")
    assert done.returncode == 0, done.stderr
    by_index = {row["index"]: row for row in rows}
    assert sorted(by_index) == [0, 1, 2]
    for row in rows:
        assert row["num_tokens"] == len(row["tokens"])
        assert row["logprob"] == pytest.approx(sum(t["logprob"] for t in row["tokens"]))
        assert row["is_greedy"] == all(t["rank"] == 1 for t in row["tokens"])
    assert "".join(t["text"] for t in by_index[2]["tokens"]) == " was blue"
    assert "nats a token, perplexity" in done.stderr
    small, _ = score([*texts, pair], "--rows", "2", "-q", "--tokens", "--top", "1")
    assert sorted(small, key=lambda row: row["index"]) == [by_index[n] for n in range(3)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no texts"),
        ("{", "line 1: is no JSON"),
        ('"a b"\n\n', "line 2: is empty"),
        ('{"prompt": "a"}', "line 1: give a text"),
        ('{"text": 5}', "line 1: give a text"),
        ("[" * 100_000, "line 1: is"),
    ],
)
def test_lines_that_cannot_be_scored_are_named(text: str, says: str) -> None:
    done = finback("score", "-", stdin=text)
    assert done.returncode == 2
    assert says in done.stderr


def test_texts_that_cannot_be_rated_are_named() -> None:
    _, done = score(["The sea", ""])
    assert done.returncode == 2
    assert "text 2: " in done.stderr
