"""Conversations with a name go on where they ended; states can be listed and deleted."""

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import finback

QUESTION = "Tell me about the sea, please, and about the old ship.\n"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {
        "FINBACK_STATES": str(tmp_path / "states"),
        "FINBACK_SESSIONS": str(tmp_path / "sessions"),
    }


def chat(home: dict[str, str], text: str, *args: str) -> tuple[str, str]:
    options = ("--no-think", "--max-tokens", "16", "--seed", "1")
    done = finback("chat", *options, *args, stdin=text, **home)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_session_goes_on_without_computing_it_again(home: dict[str, str]) -> None:
    both, _ = chat(home, QUESTION + "And the wolf?\n")
    first, _ = chat(home, QUESTION, "--session", "one")
    second, talk = chat(home, "And the wolf?\n", "--session", "one")
    assert first + second == both
    assert "(session one: 1 turns so far)" in talk
    assert "kept from before)" in talk
    commands = "/undo\n/branch two\nAnd the wolf?\n/sessions\n"
    other, talk = chat(home, commands, "--session", "one")
    assert other == second
    assert "(kept as two)" in talk
    assert "one\ntwo" in talk
    value = json.loads((Path(home["FINBACK_SESSIONS"]) / "two.json").read_text())
    assert [m["role"] for m in value["messages"]] == ["user", "assistant"] * 2


def test_a_conversation_without_a_name_leaves_nothing(home: dict[str, str]) -> None:
    _, talk = chat(home, QUESTION + "And the wolf?\n")
    assert "kept from before)" in talk
    assert list(Path(home["FINBACK_STATES"]).iterdir()) == []
    assert not Path(home["FINBACK_SESSIONS"]).exists()


def test_a_question_survives_a_kill_before_its_answer(home: dict[str, str]) -> None:
    expected, _ = chat(home, QUESTION)
    folder = Path(home["FINBACK_SESSIONS"])
    folder.mkdir()
    messages = [{"role": "user", "content": QUESTION.strip()}]
    value = {"format": 1, "model": "storyteller", "messages": messages, "ids": []}
    (folder / "one.json").write_text(json.dumps(value))
    out, talk = chat(home, "", "--session", "one")
    assert out == expected
    assert "the last question was not answered" in talk


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 9}', '{"format": 1, "messages": 5}'])
def test_a_damaged_session_is_named(home: dict[str, str], content: str) -> None:
    folder = Path(home["FINBACK_SESSIONS"])
    folder.mkdir()
    (folder / "one.json").write_text(content)
    done = finback("chat", "--session", "one", stdin="", **home)
    assert done.returncode == 3
    assert "one.json" in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "one.json").read_text() == content


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b", "x" * 65])
def test_odd_names_are_refused(home: dict[str, str], name: str) -> None:
    done = finback("chat", "--session", name, stdin="", **home)
    assert done.returncode == 2
    assert "a session's name has" in done.stderr


def test_states_are_listed_deleted_and_pruned(home: dict[str, str]) -> None:
    assert "no states in" in finback("cache", "list", **home).stdout
    chat(home, QUESTION + "And the wolf?\n", "--session", "one")
    states = json.loads(finback("cache", "list", "--json", **home).stdout)["states"]
    assert len(states) == 4
    assert "4 states, " in finback("cache", "list", **home).stdout
    done = finback("cache", "rm", states[0]["id"][:12], **home)
    assert done.returncode == 0
    assert finback("cache", "rm", "zz", **home).returncode == 2
    assert finback("cache", "rm", "", **home).returncode == 2
    folder = Path(home["FINBACK_STATES"])
    damaged = folder / f"{'a' * 40}.damaged"
    damaged.write_bytes(b"x" * 1000)
    (folder / "mine.damaged").write_bytes(b"not finback's")
    assert finback("cache", "prune", "--to", "2000kB", **home).returncode == 0
    assert not damaged.exists()
    assert len(list(folder.iterdir())) == 4
    assert "deleted 3 files" in finback("cache", "prune", "--to", "0", **home).stderr
    assert finback("cache", "prune", "--to", "much", **home).returncode == 2
    out, _ = chat(home, "So?\n", "--session", "one")  # without states it computes all again
    assert out
