"""A short name for a checkpoint's contents, the same wherever its folder lies."""

import hashlib
import json
import os

from finback.checkpoint.files import open_file
from finback.checkpoint.index import Checkpoint
from finback.errors import DamagedFile

SAMPLES, SAMPLE_BYTES = 5, 4096


def fingerprint(checkpoint: Checkpoint) -> str:
    """Digest the config, and of each file its size, its header and samples of its data.

    Reading it all would take hours for a large model; two models that agree in all of this are the
    same for every purpose here.

    Raises:
        DamagedFile: A file cannot be read.
    """
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    paths = {checkpoint.folder / name for name in checkpoint.files}
    paths |= {ref.path for ref in checkpoint.tensors.values()}  # a converted spine's too
    for path in sorted(paths, key=lambda path: (path.name, path)):
        try:
            with os.fdopen(open_file(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = file.read(min(size, int.from_bytes(file.read(8), "little")))
                digest.update(f"{path.name} {size}".encode() + hashlib.sha256(header).digest())
                for n in range(SAMPLES):
                    file.seek(max(0, (size - SAMPLE_BYTES) * n // (SAMPLES - 1)))
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise DamagedFile(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()[:32]
