"""The commands about disk and memory: profile, trace and replay, convert, memory options."""

import builtins
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finback.cli.main import exit_code_of
from finback.kernels.library import instruction_sets
from finback.llm import LLM
from tests.conftest import DATA


def finback(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "finback", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def test_a_profile_accounts_for_every_second() -> None:
    options = ("--raw", "--max-tokens", 20, "--seed", 1, "The sea")
    done = finback("run", "--json", "--profile", *options)
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)["profile"]
    for part in ("prompt", "decode"):
        p = profile[part]
        assert p["compute_s"] + p["wait_s"] + p["other_s"] == pytest.approx(p["wall_s"], rel=0.02)
        assert p["compute_s"] == pytest.approx(sum(p["compute"].values()))
    assert profile["peak_memory_bytes"] > 0
    assert sum(profile["plan"].values()) <= profile["budget_bytes"]
    text = finback("run", "--profile", *options).stderr
    for word in ("prompt ", "decode ", "disk ", "read ", "experts ", "memory "):
        assert f"\n{word}" in text


def test_routes_are_recorded_and_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "routes.npz"
    options = ("--raw", "-q", "--seed", 1, "--max-tokens", 30)
    done = finback("run", *options, "--trace", trace, "The sea")
    assert done.returncode == 0, done.stderr
    report = json.loads(finback("replay", trace, "--memory", "10%", "--json").stdout)
    assert report["steps"] == 30
    (row,) = report["rows"]
    assert row["hits"]["belady"] >= row["hits"]["distance"] > 0
    shown = finback("replay", trace)
    assert "belady" in shown.stdout
    assert "█" in shown.stdout
    bad = finback("replay", DATA / "tiny-k3" / "config.json")
    assert bad.returncode == 3
    assert "is no file of finback's" in bad.stderr
    assert finback("replay", trace, "--memory", "nothing").returncode == 2


def test_a_model_made_of_links_runs_from_a_disk_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a download's cache: every file a link, some through another link, nothing written."""
    folder, blobs = tmp_path / "model", tmp_path / "blobs"
    folder.mkdir()
    shutil.copytree(DATA / "tiny-k3", blobs)
    for number, path in enumerate(sorted(blobs.iterdir())):
        between = blobs / f"link-{number}"
        between.symlink_to(path.name)
        (folder / path.name).symlink_to(between if number % 2 else path)
    opened = io.open

    def refuse(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, "Read-only file system", str(file))
        return opened(file, mode, *rest, **more)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", refuse)
    monkeypatch.setattr(os, "mkdir", lambda path, *_: refuse(path, "w"))
    with LLM(folder, expert_slots=2, stream_spine=True) as llm:
        logits = llm.logits([1, 2, 3])
        llm._loaded.experts.check()
        llm._loaded.spine.check()
    with LLM(DATA / "tiny-k3") as llm:
        np.testing.assert_array_equal(llm.logits([1, 2, 3]), logits)
    monkeypatch.setattr(sys, "argv", ["finback", "convert", str(folder), "--spine", "int8"])
    assert exit_code_of() == 1
    config = str(DATA / "tiny-k3" / "config.json")
    monkeypatch.setattr(sys, "argv", ["finback", "synth", str(tmp_path / "new"), "--like", config])
    assert exit_code_of() == 1


@pytest.mark.parametrize("option", ["--trace", "--heat"])
def test_files_that_cannot_be_written_are_refused_before_anything_is_loaded(option: str) -> None:
    for path in ("/", ".", "/nope/x/y"):
        done = finback("run", "--raw", option, path, "x")
        assert done.returncode == 2
        assert "is no file that can be written" in done.stderr


@pytest.mark.skipif(not instruction_sets(), reason="needs the native library")
def test_heat_is_kept_and_a_broken_file_is_said(tmp_path: Path) -> None:
    heat = tmp_path / "heat.npz"
    options = ("run", "--raw", "--context", 64, "--max-tokens", 5, "--heat", heat, "The sea")
    least = finback(*options, "--memory", "40MiB").stderr.split("at least ")[1].split()[0]
    budget = f"{int(least) + 4}MiB"  # too little for all experts
    assert finback(*options, "--memory", budget).returncode == 0
    assert heat.stat().st_size > 0
    heat.write_bytes(b"junk")
    done = finback(*options, "--memory", budget)
    assert done.returncode == 0
    assert "starting without it" in done.stderr


def test_a_converted_spine_is_used_by_name(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DATA / "tiny-k3", model)
    missing = finback("run", "-m", model, "--raw", "--spine", "int8", "x")
    assert missing.returncode == 3
    assert "finback convert" in missing.stderr
    done = finback("convert", model, "--spine", "int8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["after_bytes"] > 0
    used = finback("run", "-m", model, "--raw", "--max-tokens", 3, "--spine", "int8", "x")
    assert used.returncode == 0, used.stderr
    assert "int8 spine" in used.stderr


@pytest.mark.skipif(not instruction_sets(), reason="needs the native library")
def test_memory_that_is_no_size_or_too_little() -> None:
    wrong = finback("run", "--raw", "--memory", "plenty", "x")
    assert wrong.returncode == 2
    assert "is no size; write it as 4GiB" in wrong.stderr
    little = finback("run", "--raw", "--memory", "40MiB", "x")
    assert little.returncode == 4
    assert "needs at least" in little.stderr


def test_a_longer_context_than_planned_is_refused_with_the_option() -> None:
    done = finback("run", "--raw", "--context", 8, "a longer text than eight tokens hold, surely")
    assert done.returncode == 2
    assert "--context" in done.stderr


def test_a_disk_is_measured_only_on_a_model_of_some_size() -> None:
    done = finback("bench", "stream", DATA / "tiny-k3", "--rounds", 1)
    assert done.returncode == 2
    assert "too small to measure a disk with" in done.stderr
