"""What many tests share: tiny checkpoints, a copy that may be damaged, safetensors by hand."""

import itertools
import json
import os
import secrets
import shutil
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail.
# What a shell starts in the background ignores Ctrl-C; tests that send it need it as in front.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples each time, unless more are asked for.
settings.register_profile(
    "finback",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="FINBACK_EXAMPLES" not in os.environ,
)
settings.load_profile("finback")

DATA = Path(__file__).parent / "data"
# Seeds that nobody gave differ with this, for looking for tests that pass by luck.
LUCK = os.environ.get("FINBACK_LUCK", "")
# Of properties that load a model for each example; more with FINBACK_EXAMPLES.
EXAMPLES = int(os.environ.get("FINBACK_EXAMPLES", "4"))
TINY = ("tiny-k3", "tiny-kimi-linear")


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest) -> Path:
    """Each tiny checkpoint in turn."""
    return DATA / str(request.param)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of tiny-k3 to be damaged."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (DATA / "tiny-k3").iterdir():
        if path.name not in ("reference.safetensors", "independent.safetensors"):
            shutil.copy(path, folder / path.name)
    return folder


def write_safetensors(
    path: Path, header: Any, data: bytes = b"", *, length: int | None = None
) -> Path:
    """Write a file from a header given as JSON value or raw bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; dots step into objects, None removes a key."""
    value = json.loads(path.read_text())
    for dotted, new in changes.items():
        *parents, key = dotted.split("__")
        target = value
        for parent in parents:
            target = target[parent]
        if new is None:
            target.pop(key)
        else:
            target[key] = new
    path.write_text(json.dumps(value))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header and its data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


@pytest.fixture(autouse=True, scope="session")
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep states and sessions of all tests out of the user's folders."""
    home = tmp_path_factory.mktemp("home")
    before = {name: os.environ.get(name) for name in ("FINBACK_STATES", "FINBACK_SESSIONS")}
    os.environ["FINBACK_STATES"] = str(home / "states")
    os.environ["FINBACK_SESSIONS"] = str(home / "sessions")
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def known_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the seeds that nobody gave from the test's name, so that no test passes by luck."""
    drawn = itertools.count()

    def randbits(bits: int) -> int:
        if LUCK:
            print(f"@drew {request.node.nodeid}")
        name = f"{request.node.nodeid} {LUCK} {next(drawn)}"
        return zlib.crc32(name.encode()) & ((1 << bits) - 1)

    monkeypatch.setattr(secrets, "randbits", randbits)
