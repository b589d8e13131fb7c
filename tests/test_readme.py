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
    """Find every finback command in the README's sessions."""
    bodies = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    lines = [line for body in bodies for line in body.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ finback ")]


def scripts() -> list[str]:
    """Find every block of shell commands that uses finback."""
    bodies = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    return [body for body in bodies if "finback " in body]


def test_there_are_commands() -> None:
    assert len(commands()) >= 3
    assert len(scripts()) >= 3


@pytest.mark.parametrize("script", [*commands(), *scripts()])
def test_the_commands_of_the_readme_run(script: str, tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    command = f'finback() {{ {shlex.quote(sys.executable)} -m finback "$@"; }}\nset -e\n{script}'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
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
