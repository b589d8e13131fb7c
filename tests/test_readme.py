"""The README's commands and its Python run as written."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """Find every finback command in the README's blocks."""
    lines = []
    for kind, body in re.findall(r"```(console|sh)\n(.*?)```", README, re.DOTALL):
        for line in body.splitlines():
            line = line.removeprefix("$ ") if kind == "console" and line.startswith("$ ") else line
            if "finback " in line and line.startswith(("finback", "echo")):
                lines.append(line)
    return lines


def test_there_are_commands() -> None:
    assert len(commands()) >= 6


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_runs(command: str) -> None:
    line = command.replace("finback ", f"{shlex.quote(sys.executable)} -m finback ", 1)
    if command.startswith("echo"):
        line = command.replace("| finback ", f"| {shlex.quote(sys.executable)} -m finback ")
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_output_shown_is_the_output_given() -> None:
    shown = re.search(r"\$ finback inspect tests/data/tiny-k3\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    command = [sys.executable, "-m", "finback", "inspect", "tests/data/tiny-k3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == shown[1].strip()


def test_the_python_of_the_readme_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
