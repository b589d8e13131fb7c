"""States that are kept: the same bits after a restore, and nothing that cannot be trusted."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finback import LLM, ChatOptions
from finback.bench.state import StateReport, measure_prefix
from finback.config import SamplingParams
from finback.engine import snapshots
from finback.engine.snapshots import SnapshotStore, evicted, list_snapshots
from finback.engine.statefile import MAGIC, read_header, read_state, write_state
from finback.errors import DamagedFile
from finback.models.loading import Loaded
from finback.models.state import LatentState, SequenceState
from finback.storage.arena import MemoryPool
from tests.conftest import DATA
from tests.helpers import extend, load_all

IDS = np.random.default_rng(5).integers(0, 500, 60).tolist()
PROMPT = "The whale and the ship and the sea and the wind and the whale and the ship"


@pytest.fixture
def loaded(tiny: Path) -> Loaded:
    return load_all(tiny)


def computed(loaded: Loaded, count: int) -> SequenceState:
    state = SequenceState()
    extend(loaded.model, state, IDS[:count])
    return state


def test_a_state_comes_back_at_every_position(loaded: Loaded, tmp_path: Path) -> None:
    whole = extend(loaded.model, SequenceState(), IDS[:24])
    state = SequenceState()
    for position in range(1, 24):
        extend(loaded.model, state, IDS[position - 1 : position])
        path = tmp_path / f"{position}.state"
        size = write_state(path, "m", IDS[:position], state)
        assert path.stat().st_size == size
        again = read_state(path, "m", IDS[:position], loaded.model, loaded.reader, MemoryPool())
        assert again.position == position
        rest = extend(loaded.model, again, IDS[position:24])
        np.testing.assert_array_equal(rest, whole[position:])
    assert len(list(tmp_path.iterdir())) == 23  # nothing else


def damage(path: Path, at: int, by: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(by)


def test_what_cannot_be_trusted_is_refused_by_name(loaded: Loaded, tmp_path: Path) -> None:
    good = tmp_path / "good.state"
    size = write_state(good, "m", IDS[:30], computed(loaded, 30))
    header, start = read_header(good)
    cases: dict[str, tuple[int, bytes | None, str]] = {
        "older": (0, b"finback state 1\n", "no state of this version"),
        "foreign": (0, b"PK nonsense 1234", "no state of this version"),
        "long header": (len(MAGIC), (1 << 40).to_bytes(8, "little"), "header is cut, or larger"),
        "header": (60, b"!", "header is cut or damaged"),
        "short": (100, None, "header is cut or damaged"),
        "shorter": (10, None, "no state of this version"),
    }
    for one in header["arrays"]:
        at = start + one["at"] + one["bytes"] // 2
        said = f"{one['kind']} of layer {one['layer']} is damaged"
        cases[f"{one['kind']} {one['layer']}"] = (at, b"\x01\x02\x03", said)
    for name, (at, by, says) in cases.items():
        path = tmp_path / f"{name}.state"
        shutil.copy(good, path)
        if by is None:
            os.truncate(path, at)
        else:
            damage(path, at, by)
        with pytest.raises(DamagedFile, match=says):
            read_state(path, "m", IDS[:30], loaded.model, loaded.reader, MemoryPool())
    os.truncate(good, size - 4096)
    with pytest.raises(Exception, match=r"good\.state"):
        read_state(good, "m", IDS[:30], loaded.model, loaded.reader, MemoryPool())
    loaded.reader.check()


def test_half_states_and_those_of_others_are_refused(loaded: Loaded, tmp_path: Path) -> None:
    path = tmp_path / "one.state"

    def refused(says: str, tokens: list[int], model: str = "m") -> None:
        with pytest.raises(DamagedFile, match=says):
            read_state(path, model, tokens, loaded.model, loaded.reader, MemoryPool())

    write_state(path, "m", IDS[:30], computed(loaded, 30))
    refused("another model", IDS[:30], model="n")
    refused("another text", IDS[:29])
    for layer in range(loaded.model.shape.num_layers):
        half = computed(loaded, 30)
        del half.layers[layer]
        write_state(path, "m", IDS[:30], half)
        refused("lacks parts", IDS[:30])
    short = computed(loaded, 30)
    for part in short.layers.values():
        if isinstance(part, LatentState):
            part.drop_last(1)  # latent rows of an earlier boundary than the recurrence
    write_state(path, "m", IDS[:30], short)
    refused("has another size", IDS[:30])


def rewrite_header(path: Path, **changes: Any) -> None:
    header, start = read_header(path)
    body = path.read_bytes()[start:]
    text = json.dumps(header | changes).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little") + text
    path.write_bytes(head + b"\0" * (-len(head) % 4096) + body)


def test_hostile_headers_are_refused(loaded: Loaded, tmp_path: Path) -> None:
    path = tmp_path / "one.state"
    state = computed(loaded, 30)
    write_state(path, "m", IDS[:30], state)
    arrays = read_header(path)[0]["arrays"]
    hostile: tuple[dict[str, Any], ...] = (
        {"tokens": "abc"},
        {"tokens": [1.5]},
        {"tokens": [-1]},
        {"bytes": -1},
        {"bytes": 1 << 60},
        {"arrays": {}},
        {"arrays": [5]},
        {"arrays": [{**arrays[0], "at": 1 << 40}, *arrays[1:]]},
        {"arrays": [{**arrays[0], "shape": [1 << 40]}, *arrays[1:]]},
        {"arrays": [{**arrays[0], "layer": 999}, *arrays[1:]]},
        {"arrays": [*arrays, arrays[0]]},
        {"model": 5},
        {"model": "\ud800"},
        {"tokens": [], "arrays": [], "bytes": 0},
    )
    for changes in hostile:
        write_state(path, "m", IDS[:30], state)
        rewrite_header(path, **changes)
        with pytest.raises(DamagedFile, match=r"one\.state"):
            read_state(path, "m", IDS[:30], loaded.model, loaded.reader, MemoryPool())


def test_the_longest_prefix_is_found_and_damage_is_set_aside(
    loaded: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(tmp_path, "m", loaded.reader)
    for count in (16, 24, 40):
        assert store.save(IDS[:count], computed(loaded, count)) is not None
    assert store.save(IDS[:3], computed(loaded, 3)) is None  # faster computed than found
    for length, found in ((60, 40), (40, 24), (24, 16), (16, None), (5, None)):
        one = store.find(IDS[:length])
        assert (one and one.position) == found
    assert store.find([1, *IDS]) is None
    again = SnapshotStore(tmp_path, "m", loaded.reader)
    longest = again.find(IDS)
    assert longest is not None
    assert SnapshotStore(tmp_path, "other", loaded.reader).find(IDS) is None
    last = read_header(longest.path)[0]["arrays"][-1]
    start = read_header(longest.path)[1]
    damage(longest.path, start + last["at"] + last["bytes"] - 9, b"\xff" * 9)
    caplog.set_level(logging.WARNING)
    assert again.load(longest, IDS[:40], loaded.model, MemoryPool()) is None
    assert "set aside" in caplog.text
    assert not longest.path.exists()
    assert longest.path.with_suffix(".damaged").exists()
    shorter = again.find(IDS)
    assert shorter is not None
    assert shorter.position == 24
    assert again.load(shorter, IDS[:24], loaded.model, MemoryPool()) is not None
    (tmp_path / "junk.state").write_bytes(b"junk")
    assert len(list_snapshots(tmp_path)) == 2
    assert (tmp_path / "junk.state").exists()  # somebody else's
    (tmp_path / "old.state").write_bytes(b"finback state 0\n" + b"x" * 100)
    assert len(list_snapshots(tmp_path)) == 2
    assert (tmp_path / "old.damaged").exists()
    again.find(IDS[:30]).path.unlink()  # type: ignore[union-attr]
    gone = again.find(IDS[:30])
    assert gone is not None
    assert (
        again.load(gone, IDS[:24], loaded.model, MemoryPool()) is None
    )  # another process has deleted it


def test_the_quota_is_kept_and_what_is_worth_least_goes(loaded: Loaded, tmp_path: Path) -> None:
    one = write_state(tmp_path / "probe", "m", IDS[:50], computed(loaded, 50))
    (tmp_path / "probe").unlink()
    store = SnapshotStore(tmp_path, "m", loaded.reader, quota=int(3.1 * one) + snapshots.MAX_SLACK)
    for count in (40, 20, 30, 50):
        store.save(IDS[:count], computed(loaded, count))
    there = list_snapshots(tmp_path)
    assert sum(item.num_bytes for item in there) <= 3.1 * one + snapshots.MAX_SLACK
    assert sorted(item.position for item in there) == [30, 40, 50]  # the cheapest to rebuild went
    assert evicted(there, 0) == sorted(there, key=lambda item: item.worth)


def test_a_full_disk_ends_keeping_and_nothing_else(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(tiny) as llm:
        expected = llm.generate(PROMPT, max_tokens=12, seed=3).token_ids
    folder = str(tmp_path / "states")
    with LLM(tiny, states=folder) as llm:
        llm.generate(PROMPT, max_tokens=2, seed=3)
        kept = sorted(path.name for path in Path(folder).iterdir())
        assert kept

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(snapshots.os, "fsync", full)
        for _ in range(2):
            assert llm.generate(PROMPT, max_tokens=12, seed=3).token_ids == expected
    assert caplog.text.count("cannot be kept any more (No space left") == 1
    assert sorted(path.name for path in Path(folder).iterdir()) == kept


@pytest.mark.parametrize("drafts", ["off", "lookup"])
def test_texts_go_on_from_kept_states_as_they_would_have(
    tiny: Path, tmp_path: Path, drafts: str
) -> None:
    folder = str(tmp_path / "states")
    with LLM(tiny) as llm:
        ids = llm.tokenize(PROMPT)
        answer = llm.generate(ids, max_tokens=20, seed=3, ignore_eos=True).token_ids
        longer = [*ids, *answer, 5, 6, 7]
        expected = llm.generate(longer, max_tokens=20, seed=4, logprobs=1)
    moved = tmp_path / "moved"
    shutil.copytree(tiny, moved)
    with LLM(tiny, states=folder, drafts=drafts) as llm:
        first = llm.generate(ids, max_tokens=20, seed=3, ignore_eos=True)
        assert first.token_ids == answer
    for place in (tiny, moved):
        with LLM(place, states=folder, drafts=drafts) as llm:
            out = llm.generate(longer, max_tokens=20, seed=4, logprobs=1)
            assert (out.token_ids, out.logprobs) == (expected.token_ids, expected.logprobs)
            assert out.stats.restored_tokens >= len(longer) - 4  # but the answer's last token
            llm.engine.check()
        shutil.rmtree(folder)
        with LLM(tiny, states=folder, drafts=drafts) as llm:
            llm.generate(ids, max_tokens=20, seed=3, ignore_eos=True)
    with LLM(tiny, states=folder, activations="float32") as llm:
        assert llm.generate(longer, max_tokens=1).stats.restored_tokens == 0
    with LLM(tiny, states=folder) as llm:
        rated = llm.generate(longer, max_tokens=1, prompt_logprobs=0)
        assert len(rated.prompt_logprobs) == len(longer) - 1  # which needs every row


@pytest.mark.parametrize("rows", [256, 20, 7])
def test_the_same_prompt_again_needs_one_row(tiny: Path, tmp_path: Path, rows: int) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    with LLM(tiny) as llm:
        ids = llm.tokenize(PROMPT)
        expected = [llm.generate(ids, seed=seed, **options) for seed in range(3)]
    for drafts in ("off", "lookup"):
        folder = str(tmp_path / drafts)
        with LLM(tiny, states=folder, max_rows=rows, drafts=drafts) as llm:
            for seed, alone in enumerate(expected):
                before = llm.spans.counts["rows"]
                out = llm.generate(ids, seed=seed, **options)
                assert (out.token_ids, out.logprobs) == (alone.token_ids, alone.logprobs)
                assert out.stats.restored_tokens == (len(ids) - 1 if seed else 0)
                if drafts == "off":
                    prompt_rows = 1 if seed else len(ids)
                    assert llm.spans.counts["rows"] - before == prompt_rows + 11
            outs = llm.generate([ids] * 3, seed=1, **options)
            assert [out.token_ids for out in outs] == [expected[1].token_ids] * 3
            llm.engine.check()


def test_restoring_a_prefix_is_measured(tiny: Path, tmp_path: Path) -> None:
    report = StateReport()
    measure_prefix(report, tiny, tmp_path, rounds=2, tokens=40)
    assert report.prefix_tokens == 39
    assert report.restore_speedup > 0


def test_a_system_message_is_computed_once(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You tell stories of the sea, of ships and of whales."}
    folder = str(tmp_path / "states")

    def ask(llm: LLM, text: str) -> Any:
        messages = [system, {"role": "user", "content": text}]
        return llm.chat(messages, max_tokens=6, seed=1)

    with LLM() as llm:
        expected = [ask(llm, text).token_ids for text in ("Hello", "Tell me more")]
    with LLM(states=folder) as llm:
        first, second = (ask(llm, text) for text in ("Hello", "Tell me more"))
        assert [first.token_ids, second.token_ids] == expected
        assert llm.chat_format is not None
        opening = llm.chat_format.encode([system], ChatOptions(), opens_answer=False)
        assert second.stats.restored_tokens == len(opening) > 16


def test_a_state_larger_than_the_quota_costs_no_other(loaded: Loaded, tmp_path: Path) -> None:
    SnapshotStore(tmp_path, "m", loaded.reader).save(IDS[:20], computed(loaded, 20))
    small = SnapshotStore(tmp_path, "m", loaded.reader, quota=1000)
    assert small.save(IDS[:30], computed(loaded, 30)) is None
    assert [one.position for one in list_snapshots(tmp_path)] == [20]


def test_a_file_that_took_a_name_again_is_read_anew(loaded: Loaded, tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "m", loaded.reader)
    one = store.save(IDS[:20], computed(loaded, 20))
    for _ in range(2):
        assert one is not None
        assert store.load(one, IDS[:20], loaded.model, MemoryPool()) is not None
        header, start = read_header(one.path)
        damage(one.path, start + header["arrays"][0]["at"] + 100, b"damage")
        assert store.load(one, IDS[:20], loaded.model, MemoryPool()) is None
        one = store.save(IDS[:20], computed(loaded, 20))


def test_swapped_pages_are_noticed(loaded: Loaded, tmp_path: Path) -> None:
    path = tmp_path / "one.state"
    write_state(path, "m", IDS[:30], computed(loaded, 30))
    header, start = read_header(path)
    raw = bytearray(path.read_bytes())
    one = next(a for a in header["arrays"] if a["bytes"] >= 8192)
    at = start + one["at"]
    first, second = raw[at : at + 4096], raw[at + 4096 : at + 8192]
    assert first != second
    raw[at : at + 8192] = second + first
    path.write_bytes(raw)
    with pytest.raises(DamagedFile, match="is damaged"):
        read_state(path, "m", IDS[:30], loaded.model, loaded.reader, MemoryPool())


def test_no_more_states_are_restored_than_fit(tiny: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"states": str(tmp_path), "max_sequences": 8}
    with LLM(tiny, **options) as llm:
        ids = llm.tokenize(PROMPT)
        llm.generate(ids, max_tokens=1, seed=1)
    with LLM(tiny, resident_sequences=2, **options) as llm:
        for number in range(6):
            llm.engine.add([*ids, number], SamplingParams(max_tokens=4))
        live = llm.engine._scheduler._live.values()
        assert sum(bool(sequence.state.layers) for sequence in live) == 2
        while not llm.engine.is_idle:
            llm.engine.step()
            held = [s for s in live if s.state.position and not s.state.is_spilled]
            assert len(held) <= 2


SCRIPT = """
import sys
from finback import LLM
with LLM(sys.argv[1], states=sys.argv[2]) as llm:
    ids = llm.tokenize(sys.argv[3])
    print("ready", flush=True)
    for n in range(1000):
        ids = ids[:40] + [n % 400, (7 * n) % 400]
        llm.generate(ids, max_tokens=30, temperature=0, ignore_eos=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_states_or_none(tmp_path: Path) -> None:
    model, folder = DATA / "tiny-k3", tmp_path / "states"
    rng = np.random.default_rng(1)
    with LLM(model) as llm:
        expected = llm.generate(PROMPT * 3, max_tokens=30, temperature=0).token_ids
    for _ in range(20):
        command = [sys.executable, "-c", SCRIPT, str(model), str(folder), PROMPT * 3]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(float(rng.uniform(0, 0.4)))  # the random moment of the kill
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with LLM(model, states=str(folder)) as llm:
            assert llm.generate(PROMPT * 3, max_tokens=30, temperature=0).token_ids == expected
            loaded = llm._loaded
            for one in list_snapshots(folder):
                tokens = read_header(one.path)[0]["tokens"]
                read_state(one.path, one.model, tokens, loaded.model, loaded.reader, MemoryPool())
    assert not list(folder.glob("*.damaged"))
