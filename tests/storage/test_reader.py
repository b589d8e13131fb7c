"""Reads under bad conditions: every failure is an error that names the file, and nothing hangs."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finback.errors import ReadError
from finback.spans import Spans
from finback.storage import files, reader
from finback.storage.arena import BLOCK, reserve
from finback.storage.extents import Extent, place
from finback.storage.reader import Priority, Reader

SIZE = 3_000_001


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, SIZE, np.uint8).tobytes())
    return path


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def disk(request: pytest.FixtureRequest) -> Iterator[Reader]:
    one = Reader(Spans(), threads=3, direct=request.param)
    yield one
    one.close()
    one.check()


def bytes_of(path: Path, extent: Extent) -> bytes:
    return path.read_bytes()[extent.offset : extent.offset + extent.num_bytes]


def test_extents_come_whole_wherever_they_begin(
    file: Path, disk: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "DIRECT_FROM", 0)
    monkeypatch.setattr(reader, "PIECE", 3 * BLOCK)
    extents = [
        Extent(file, 0, 1),
        Extent(file, 4095, 2),
        Extent(file, 5000, 100_000),
        Extent(file, BLOCK, BLOCK),
        Extent(file, SIZE - 7, 7),
        Extent(file, 123, SIZE - 123),
        Extent(file, 77, 0),
    ]
    starts, size = place(extents)
    memory = reserve(size)
    ticket = disk.submit(extents, memory)
    disk.wait([ticket])
    assert ticket.is_done
    for extent, start in zip(extents, starts, strict=True):
        got = memory[start : start + extent.num_bytes].tobytes()
        assert got == bytes_of(file, extent)
    assert disk.is_idle


def test_a_file_that_shrank(file: Path, disk: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    for direct_from in (0, 1 << 30):
        monkeypatch.setattr(reader, "DIRECT_FROM", direct_from)
        with pytest.raises(ReadError, match=r"weights.bin: ended after .* it shrank while in use"):
            disk.read(Extent(file, SIZE - 10, 20))


def test_a_file_that_vanished(tmp_path: Path, disk: Reader) -> None:
    with pytest.raises(ReadError, match="gone.bin: .*No such file"):
        disk.read(Extent(tmp_path / "gone.bin", 0, 10))


def test_a_device_that_fails(file: Path, disk: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.preadv, []

    def fail(*args: object) -> int:
        calls.append(1)
        if len(calls) > 2:
            raise OSError(errno.EIO, "Input/output error")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "PIECE", 64 * BLOCK)
    monkeypatch.setattr(files.os, "preadv", fail)
    with pytest.raises(ReadError, match="weights.bin: reading at byte [0-9]+ failed .Input/output"):
        disk.read(Extent(file, 0, SIZE))
    monkeypatch.setattr(files.os, "preadv", real)
    assert disk.read(Extent(file, 0, SIZE)).tobytes() == file.read_bytes()


def test_short_reads_are_continued(
    file: Path, disk: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that end where the next direct read could not begin."""
    real = os.preadv
    monkeypatch.setattr(reader, "DIRECT_FROM", 0)
    cuts = iter([100, BLOCK, 5000] * 1000)

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        return min(real(descriptor, views, offset), next(cuts) if len(views[0]) > BLOCK else SIZE)

    monkeypatch.setattr(files.os, "preadv", short)
    assert disk.read(Extent(file, 10, 400_000)).tobytes() == file.read_bytes()[10:400_010]


def test_direct_reads_refused_only_when_tried(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(reader, "DIRECT_FROM", 0)

    def refuse(descriptor: int, views: list[memoryview], offset: int) -> int:
        if os.get_blocking(descriptor) and descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, views, offset)

    direct: set[int] = set()
    opened = os.open

    def note(path: object, flags: int, *rest: int) -> int:
        descriptor = opened(path, flags, *rest)  # type: ignore[arg-type]
        if flags & getattr(os, "O_DIRECT", 0):
            direct.add(descriptor)
        return descriptor

    monkeypatch.setattr(files.os, "open", note)
    monkeypatch.setattr(files.os, "preadv", refuse)
    disk = Reader(Spans())
    assert disk.read(Extent(file, 5, 90_000)).tobytes() == file.read_bytes()[5:90_005]
    disk.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs at /dev/shm")
def test_a_file_in_memory(disk: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "DIRECT_FROM", 0)
    path = Path("/dev/shm") / f"finback-test-{os.getpid()}"
    try:
        path.write_bytes(b"x" * 500_000)
        assert disk.read(Extent(path, 3, 400_000)).tobytes() == b"x" * 400_000
    finally:
        path.unlink()


def test_more_shards_than_descriptors(tmp_path: Path, disk: Reader) -> None:
    import resource

    paths = [tmp_path / f"shard-{n}" for n in range(300)]
    for n, path in enumerate(paths):
        path.write_bytes(bytes([n % 256]) * 5000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 32
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, in_use + 40), hard))
    try:
        for _ in range(2):
            tickets, memories = [], []
            for path in paths:
                memory = reserve(2 * BLOCK)
                tickets.append(disk.submit([Extent(path, 10, 4000)], memory))
                memories.append(memory)
            disk.wait(tickets)
            for n, memory in enumerate(memories):
                assert (memory[10:4010] == n % 256).all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_demand_goes_before_guesses_and_what_is_given_up_is_not_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, order, gate = os.preadv, [], threading.Event()

    def slow(descriptor: int, views: list[memoryview], offset: int) -> int:
        order.append(offset)
        gate.wait(60)
        return real(descriptor, views, offset)

    monkeypatch.setattr(files.os, "preadv", slow)
    disk, memory = Reader(Spans(), threads=1), reserve(10 * BLOCK)

    def ask(block: int, priority: Priority) -> reader.Ticket:
        part = memory[block * BLOCK : (block + 1) * BLOCK]
        return disk.submit([Extent(file, block * BLOCK, BLOCK)], part, priority)

    first = ask(0, Priority.DEMAND)
    while not order:
        time.sleep(0.001)
    guess, dropped, promoted = (ask(n, Priority.GUESS) for n in (1, 2, 3))
    ahead, demand = ask(4, Priority.AHEAD), ask(5, Priority.DEMAND)
    disk.cancel(dropped)
    disk.promote(promoted)
    gate.set()
    disk.wait([first, guess, promoted, ahead, demand])
    assert dropped.is_done
    assert [offset // BLOCK for offset in order] == [0, 5, 3, 4, 1]
    disk.close()


def test_a_closed_reader_says_so(file: Path, disk: Reader) -> None:
    disk.read(Extent(file, 0, 10))
    disk.close()
    with pytest.raises(ReadError, match="the model has been closed"):
        disk.read(Extent(file, 0, 10))


def test_requests_are_large_while_all_threads_have_enough_to_do(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PIECE", 4 * BLOCK)
    monkeypatch.setattr(reader, "MOST_AT_ONCE", 12 * BLOCK)
    gate, read = threading.Event(), files.OpenFile.read

    def slow(self: files.OpenFile, view: memoryview, offset: int) -> int:
        gate.wait(60)
        return read(self, view, offset)

    monkeypatch.setattr(files.OpenFile, "read", slow)
    disk, requests = Reader(Spans(), threads=2), list[Extent]()
    disk.on_read = requests.append

    def submit(number: int, priority: Priority, pieces: int) -> tuple[Extent, Any, Any]:
        extent = Extent(file, number * 50 * BLOCK, pieces * 4 * BLOCK)
        memory = reserve(place([extent])[1])
        return extent, memory, disk.submit([extent], memory, priority)

    def read_all(tickets: list[tuple[Extent, Any, Any]]) -> list[int]:
        requests.clear()
        gate.set()
        disk.wait([ticket for *_, ticket in tickets])
        for extent, memory, _ in tickets:
            assert memory.tobytes() == bytes_of(file, extent)
        disk.check()
        gate.clear()
        return sorted(one.num_bytes // BLOCK for one in requests)

    busy = [submit(number, Priority.DEMAND, 1) for number in (0, 1)]
    many = [submit(number, Priority.DEMAND, 5) for number in (2, 3)]
    sizes = read_all([*busy, *many])  # of forty blocks, less at a time towards the end
    assert sizes == [3, 3, 4, 4, 4, 10, 10, 10]

    busy = [submit(number, Priority.DEMAND, 1) for number in (0, 1)]
    guesses = [submit(number, Priority.GUESS, 5) for number in (2, 3)]
    assert set(read_all([*busy, *guesses])) == {4}  # those may still be given up

    busy = [submit(number, Priority.DEMAND, 1) for number in (0, 1)]
    wrong = [submit(number, Priority.GUESS, 5) for number in (2, 3)]
    for *_, ticket in wrong:
        disk.cancel(ticket)
    few = [submit(4, Priority.DEMAND, 2)]  # one for each thread: what was given up does not count
    assert set(read_all([*busy, *few])) == {4}
    gate.set()
    submit(5, Priority.GUESS, 5)  # nobody asks about it
    disk.wait_until_idle()
    assert disk.is_idle
    disk.close()
    disk.check()
