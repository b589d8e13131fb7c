"""The commands as a person or a pipe uses them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DATA

TINY = str(DATA / "tiny-k3")
COMMAND = [sys.executable, "-m", "finback"]


def finback(*args: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "100"} | env,
        **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),  # type: ignore[arg-type]
    )


def run(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return finback("run", "-m", TINY, "--seed", "1", "--max-tokens", "6", *args, **options)


def test_text_on_stdout_and_talk_on_stderr() -> None:
    done = run("--raw", "The whale")
    assert done.returncode == 0
    assert "tokens/s" not in done.stdout
    start, figures = done.stderr.strip().splitlines()
    assert start.startswith("tiny-k3: int16 activations, ")
    for word in ("tokens/s", "read per token", "computing", "reading", "seed 1"):
        assert word in figures


def test_quiet_prints_the_answer_alone() -> None:
    quiet, loud = run("--raw", "--quiet", "The whale"), run("--raw", "The whale")
    assert quiet.stderr == ""
    assert quiet.stdout == loud.stdout


def test_json_holds_everything() -> None:
    done = run("--raw", "--json", "x")
    value = json.loads(done.stdout)
    assert done.stderr == ""
    assert len(value["token_ids"]) == 6
    assert value["finish_reason"] == "length"
    assert value["seed"] == 1
    assert value["activations"] == "int16"
    assert value["stats"]["tokens"] == 6
    assert value["stats"]["bytes_read"] > 0
    chat = json.loads(run("--json", "--no-think", "x").stdout)
    assert chat["message"]["content"] == chat["text"]


def test_standard_input_joins_the_prompt() -> None:
    both = json.loads(run("--raw", "--json", "Sum up:", stdin="A whale.\n").stdout)
    one = json.loads(run("--raw", "--json", "Sum up:\n\nA whale.").stdout)
    assert both["token_ids"] == one["token_ids"]


def test_equal_seeds_give_equal_text_and_greedy_needs_none() -> None:
    assert run("--raw", "x").stdout == run("--raw", "x").stdout
    a = finback("run", "-m", TINY, "--raw", "--temperature", "0", "--max-tokens", "4", "-q", "x")
    b = finback("run", "-m", TINY, "--raw", "--temperature", "0", "--max-tokens", "4", "-q", "x")
    assert a.stdout == b.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--temperature", "-1", "x"], "temperature"),
        (["--top-p", "0", "x"], "top_p must be above 0"),
        (["--max-tokens", "0", "x"], "max-tokens"),
        (["--nonsense", "x"], "nonsense"),
        (["--raw", "--system", "s", "x"], "leave out --raw"),
        ([], "no prompt"),
        (["--raw", ""], "no prompt"),
    ],
)
def test_wrong_use_is_exit_2(args: list[str], says: str) -> None:
    done = finback("run", "-m", TINY, *args)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    done = finback("run", "-m", TINY, "--raw", stdin="word " * 5000)
    assert done.returncode == 2
    assert "the model holds 4096, answer included" in done.stderr


def test_inspect_shows_roles_and_exits_3_on_missing_tensors(broken: Path) -> None:
    done = finback("inspect", TINY)
    assert done.returncode == 0
    for word in ("kimi_k3", "expert", "mxfp4", "spine", "per token", "sequence", "complete"):
        assert word in done.stdout
    index = broken / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    name = "language_model.model.norm.weight"
    value["weight_map"]["odd.weight"] = value["weight_map"].pop(name)
    index.write_text(json.dumps(value))
    for path in broken.glob("*.safetensors"):
        path.unlink()
    done = finback("inspect", str(broken))
    assert done.returncode == 3
    assert f"missing     1: {name}" in done.stdout
    assert "odd         1: odd.weight" in done.stdout
    assert "not here    11 files" in done.stdout


def test_list_names_models_that_run_accepts(tmp_path: Path, broken: Path) -> None:
    broken.rename(tmp_path / "mine")
    env = {"FINBACK_MODELS": str(tmp_path), "HF_HOME": str(tmp_path / "none")}
    listed = json.loads(finback("list", "--json", **env).stdout)
    assert [m["name"] for m in listed if m["name"] != "storyteller"] == ["mine"]
    assert "mine" in finback("list", **env).stdout
    assert run_named("mine", env).returncode == 0


def run_named(name: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return finback("run", "-m", name, "--raw", "--max-tokens", "1", "x", **env)


def test_snapshots_of_the_hugging_face_cache_follow_their_main_revision(
    tmp_path: Path, broken: Path
) -> None:
    cached = tmp_path / "hub" / "models--me--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("1111\n")
    (cached / "snapshots" / "9999").mkdir(parents=True)
    broken.rename(cached / "snapshots" / "1111")
    env = {"FINBACK_MODELS": str(tmp_path / "none"), "HF_HOME": str(tmp_path)}
    listed = {m["name"]: m["folder"] for m in json.loads(finback("list", "--json", **env).stdout)}
    assert listed["me/tiny"].endswith("1111")
    assert listed["me/tiny@9999"].endswith("9999")
    missing = finback("run", "-m", "me/huge", "x", **env)
    assert missing.returncode == 3
    assert "hf download me/huge" in missing.stderr


def test_an_unknown_instruction_set_is_refused() -> None:
    done = finback("run", "-m", TINY, "--raw", "x", FINBACK_ISA="mmx")
    assert done.returncode == 2
    assert "FINBACK_ISA is 'mmx', but this machine and build have" in done.stderr


def test_chat_keeps_the_conversation() -> None:
    lines = "Hello\n/nothing\n/help\nAgain\n/reset\n/exit\n"
    done = finback(
        "chat", "-m", TINY, "--no-think", "--max-tokens", "3", "--seed", "1", stdin=lines
    )
    assert done.returncode == 0, done.stderr
    assert "unknown command /nothing" in done.stderr
    figures = [line for line in done.stderr.splitlines() if " tokens in" in line]
    counts = [int(line.split(" tokens in")[0]) for line in figures]
    assert len(counts) == 2
    assert counts[1] > counts[0] + 30  # the second prompt holds the first turn


def test_ctrl_c_is_130_without_a_traceback() -> None:
    endless = ["--regex", "[a-z ]{4000}"]  # no token that ends the text may come before
    args = [*COMMAND, "run", "-m", TINY, "--raw", "--max-tokens", "4000", *endless, "x"]
    process = subprocess.Popen(
        args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out.endswith("\n")
    assert " out (stopped)" in err
    assert "seed " in err


@pytest.mark.parametrize(
    ("redirection", "code"),
    [("<&-", 0), ("2>&-", 0), ("2>/dev/full", 0), (">/dev/full", 1), ("</dev/null", 0)],
)
def test_unusual_standard_streams(redirection: str, code: int) -> None:
    args = " ".join([*COMMAND, "run", "-m", TINY, "--raw", "--max-tokens", "3", "x"])
    done = subprocess.run(
        ["bash", "-c", f"{args} {redirection}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_bytes_that_are_no_text() -> None:
    args = [*COMMAND, "run", "-m", TINY, "--raw", "--max-tokens", "3"]
    raw = subprocess.run([*args, b"a\xffb"], input=b"c\xfe", capture_output=True, check=False)
    assert raw.returncode == 0, raw.stderr
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(args, input=b"x", capture_output=True, env=ascii_only, check=False)
    assert done.returncode == 0, done.stderr


def test_a_failure_is_json_where_json_was_asked_for() -> None:
    done = finback("run", "-m", "/nowhere", "--json", "x")
    assert done.returncode == 3
    assert "no such folder" in json.loads(done.stdout)["error"]["message"]
    for args, says in (
        (("run", "--nosuch"), "No such option"),
        (("run", "--max-tokens", "many", "x"), "--max-tokens"),
        (("nosuch",), "No such command"),
        (("cache", "list", "more"), "unexpected extra argument"),
    ):
        done = finback(*args, "--json")
        assert done.returncode == 2
        error = json.loads(done.stdout)["error"]
        assert says in error["message"]
        assert error["exit_code"] == 2
    command = " ".join(COMMAND)
    for line in (f"{command} run --json --nosuch > /dev/full", f"{command} run -- --json x | cat"):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        assert "error" not in done.stdout


def test_reasoning_and_figures_stand_on_their_own_lines() -> None:
    done = finback("run", "-m", TINY, "--seed", "1", "--max-tokens", "3", "hello")
    last = done.stderr.splitlines()[-1]
    assert re.match(r"\d+ tokens in, 3 out \(cut at the limit\)", last)
    assert int(last.split()[0]) < 60  # no digit of the reasoning before it
    quiet = finback("run", "-m", TINY, "--seed", "1", "--max-tokens", "3", "-q", "hello")
    assert "used up before the answer began" in quiet.stderr


def test_verbose_tells_what_happens() -> None:
    done = finback("-v", "run", "-m", TINY, "--raw", "--max-tokens", "1", "x")
    assert "loaded" in done.stderr


def test_a_reader_that_leaves_the_pipe_is_no_error_to_see() -> None:
    args = " ".join([*COMMAND, "run", "-m", TINY, "--raw", "--max-tokens", "300", "x"])
    done = subprocess.run(
        ["bash", "-c", f"{args} | head -c 1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from finback.cli.main import exit_code_of; sys.argv = ['finback', '--help'];"
        "exit_code_of(); heavy = {'numpy', 'torch', 'tiktoken', 'tokenizers', 'jinja2'};"
        "heavy &= set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["run", "chat", "inspect", "list"])
def test_every_command_explains_itself(command: str) -> None:
    done = finback(command, "--help")
    assert done.returncode == 0
    assert "Usage:" in done.stdout


def test_a_start_is_quick_to_answer() -> None:
    def seconds(command: list[str]) -> float:
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start

    # A ratio, not a time, of the best of some runs in turn: starting costs little more than the
    # library that it is built with.
    commands = [[*COMMAND, "--version"], [sys.executable, "-c", "import typer"]]
    rounds = [[seconds(command) for command in commands] for _ in range(4)]
    ours, bare = (min(times) for times in zip(*rounds, strict=True))
    assert ours < 5 * bare + 0.5


def test_without_a_model_the_storyteller_runs() -> None:
    done = finback("run", "--raw", "--max-tokens", "20", "--seed", "1", "Once upon a time")
    assert done.returncode == 0
    assert len(done.stdout.split()) > 5


def test_the_generated_page_knows_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for command in (["run"], ["chat"], ["inspect"], ["list"], ["bench", "kernels"]):
        assert f"## `finback {' '.join(command)}`" in page
        for option in re.findall(r"(--[a-z-]+)", finback(*command, "--help").stdout):
            assert f"`{option}" in page or f" {option}" in page, f"{option}: run `make docs`"
