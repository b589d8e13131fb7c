"""The directions of imports, kept by the tool that knows them (the dev extra)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="needs the dev extra: pip install finback[dev]")


def test_imports_point_down() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
