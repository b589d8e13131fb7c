"""The memory budget is kept by whole processes on a checkpoint several times as large."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from finback.kernels.library import instruction_sets
from finback.planner.synth import cut_down, find_config, synthesise

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not instruction_sets(), reason="needs the native library"),
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kimi K3's experts, few and narrow: 0.6 GB."""
    folder = tmp_path_factory.mktemp("synth") / "model"
    changes = {"vocab_size": 8192, "num_experts_per_token": 4}
    config = cut_down(find_config("kimi-k3"), layers=5, hidden=512, experts=8, changes=changes)
    synthesise(folder, config)
    return folder


def run(model: Path, mib: int) -> subprocess.CompletedProcess[str]:
    words = " ".join(f"word{n}" for n in range(40))
    options = ["--memory", f"{mib}MiB", "--context", "1024", "--raw", "--json", "--profile"]
    options += ["--max-tokens", "3", "--temperature", "0"]
    command = [sys.executable, "-m", "finback", "run", "--model", str(model), *options, words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_budget_is_kept_and_changes_no_token(model: Path) -> None:
    refused = run(model, 100)
    assert refused.returncode == 4
    least = int(json.loads(refused.stdout)["error"]["message"].split("at least ")[1].split()[0])
    said = set()
    for mib in (least + 5, least + 20, least + 50, 300, 400, 500, 600, 900):
        done = run(model, mib)
        assert done.returncode == 0, done.stderr
        value = json.loads(done.stdout)
        said.add(tuple(value["token_ids"]))
        assert value["profile"]["peak_memory_bytes"] <= (mib + 64) * MIB
    assert len(said) == 1
