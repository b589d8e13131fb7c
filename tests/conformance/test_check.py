"""native/check.c: kernels checked without Python, under sanitizers and on an emulated machine."""

import shutil
import subprocess
from pathlib import Path

import pytest

from finback.kernels.library import instruction_sets

ROOT = Path(__file__).parents[2]
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
pytestmark = pytest.mark.slow


def run(*command: object, **env: str) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=env or None
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake to build native/check.c")
def test_no_sanitizer_has_anything_to_say(tmp_path: Path) -> None:
    run("cmake", "-S", ROOT, "-B", tmp_path, "-DFINBACK_SANITIZE=ON")
    run("cmake", "--build", tmp_path, "--target", "finback_check", "-j", "2")
    for isa in instruction_sets():
        out = run(tmp_path / "finback_check", FINBACK_ISA=isa)
        assert out.splitlines()[0] == isa
        assert out.endswith("ok all\n")


@pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which(EMULATOR)),
    reason=f"needs {CROSS} and {EMULATOR} (Debian: gcc-aarch64-linux-gnu, qemu-user)",
)
def test_neon_under_an_emulator(tmp_path: Path) -> None:
    sources = sorted((ROOT / "native").glob("*.c"))
    flags = ["-O3", "-std=gnu11", "-static", "-ffp-contract=off", "-fno-math-errno"]
    flags += ["-Wall", "-Wextra", "-Werror"]
    run(CROSS, *flags, *sources, "-o", tmp_path / "check", "-lm", "-lpthread")
    out = run(EMULATOR, tmp_path / "check")
    assert out.splitlines()[0] == "neon"
    assert out.endswith("ok all\n")
