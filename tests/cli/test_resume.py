"""A run that is kept goes on after Ctrl-C and kills with the text that it would have had."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_commands import COMMAND, finback

OPTIONS = ("--raw", "--seed", "4", "--max-tokens", "500", "--checkpoint", "7")
PROMPT = "The old captain looked at the sea and listened to the wind"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {
        "FINBACK_STATES": str(tmp_path / "states"),
        "FINBACK_SESSIONS": str(tmp_path / "sessions"),
    }


@pytest.fixture(scope="module")
def whole() -> str:
    return finback("run", "--raw", "--seed", "4", "--max-tokens", "500", PROMPT).stdout


def begin(home: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [*COMMAND, "run", *OPTIONS, PROMPT],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NO_COLOR": "1"} | home,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search("kept as run ([0-9a-f]+)", line):
            return process, found[1]
    raise AssertionError("it did not say how to go on")


def records(home: dict[str, str]) -> list[Path]:
    return list(Path(home["FINBACK_SESSIONS"] + "-runs").glob("*"))


def test_a_whole_run_leaves_no_record(home: dict[str, str], whole: str) -> None:
    done = finback("run", *OPTIONS, PROMPT, **home)
    assert done.stdout == whole
    assert records(home) == []


def test_ctrl_c_stops_and_keeps_and_resume_goes_on(home: dict[str, str], whole: str) -> None:
    process, name = begin(home)
    time.sleep(0.4)  # some of 500 tokens; any moment will do
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"finback run --resume {name}" in err
    assert "Traceback" not in err
    (record,) = records(home)
    kept = json.loads(record.read_text())["token_ids"]
    assert 0 < len(kept) < 500
    assert whole.startswith(out[:-1].rstrip("\n")[:100])
    done = finback("run", "--resume", name, **home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == whole
    assert "kept from before)" in done.stderr
    assert records(home) == []


@pytest.mark.parametrize("kills", [2])
def test_kills_change_nothing(home: dict[str, str], whole: str, kills: int) -> None:
    process, name = begin(home)
    for number in range(kills):
        time.sleep(0.15 + 0.1 * number)  # the moment of the kill; any will do
        process.kill()
        process.communicate()
        process = subprocess.Popen(
            [*COMMAND, "run", "--resume", name, "--checkpoint", "5"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"NO_COLOR": "1"} | home,
        )
        time.sleep(0.8)  # so that it has begun; any moment will do
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == whole


def test_chats_and_formats_go_on_too(home: dict[str, str]) -> None:
    """As if it had been killed after some tokens: the record alone is there."""
    schema = Path(home["FINBACK_SESSIONS"]).parent / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "integer"}, "minItems": 9}')
    options = ("--no-think", "--seed", "2", "--max-tokens", "40", "--json-schema", str(schema))
    expected = json.loads(finback("run", *options, "--json", "Numbers?").stdout)
    folder = Path(home["FINBACK_SESSIONS"] + "-runs")
    folder.mkdir()
    sampling = {"seed": 2, "max_tokens": 40, "json_schema": schema.read_text()}
    for count in (0, 1, 7, 20):
        value = {
            "format": 1,
            "model": None,
            "text": "Numbers?",
            "system": None,
            "as_chat": True,
            "think": False,
            "sampling": sampling,
            "options": {},
            "token_ids": expected["token_ids"][:count],
            "fingerprint": "",
        }
        (folder / "abc.json").write_text(json.dumps(value))
        done = finback("run", "--resume", "abc", "--json", **home)
        assert done.returncode == 0, done.stderr
        got = json.loads(done.stdout)
        assert (got["token_ids"], got["text"]) == (expected["token_ids"], expected["text"])


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("--resume", "nope"), 2, "no run 'nope' to go on with; there are: bad"),
        (("--resume", "../x"), 2, "no run"),
        (("--resume", "bad"), 3, "is no run of this version"),
        (("--resume", "bad", "x"), 2, "--resume has its own prompt"),
        (("--checkpoint", "often", "x"), 2, "write 256 (tokens), 10min or 30s"),
        (("--checkpoint", "0", "x"), 2, "write 256"),
        (("--checkpoint", "5", "--prompt-file", "-"), 2, "keeps one run"),
    ],
)
def test_what_cannot_be_gone_on_with_is_named(
    home: dict[str, str], args: tuple[str, ...], code: int, says: str
) -> None:
    folder = Path(home["FINBACK_SESSIONS"] + "-runs")
    folder.mkdir()
    (folder / "bad.json").write_text('{"format": 1, "text": 5}')
    done = finback("run", *args, **home)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"memory": "1GiB"}},
        {"options": {"heat": "/tmp/x"}},
        {"sampling": {"prompt": "x"}},
        {"sampling": {"temperature": "hot"}},
        {"text": "\ud800x"},
        {"fingerprint": 5},
    ],
)
def test_a_run_that_asks_for_odd_things_is_refused(home: dict[str, str], changes: Any) -> None:
    folder = Path(home["FINBACK_SESSIONS"] + "-runs")
    folder.mkdir()
    value = {
        "format": 1,
        "model": None,
        "text": "x",
        "system": None,
        "as_chat": False,
        "think": False,
        "sampling": {"seed": 1},
        "options": {},
        "token_ids": [],
        "fingerprint": "",
    }
    (folder / "abc.json").write_text(json.dumps(value | changes))
    done = finback("run", "--resume", "abc", **home)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    other = value | {"fingerprint": "of another model"}
    (folder / "abc.json").write_text(json.dumps(other))
    done = finback("run", "--resume", "abc", **home)
    assert done.returncode == 2
    assert "was with another model" in done.stderr
