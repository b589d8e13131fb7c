"""Which models are here: the embedded one, finback's own folder, the Hugging Face cache."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_data_path

from finback.checkpoint.files import exists, read_json
from finback.errors import CheckpointError, UsageError

STORYTELLER = Path(__file__).resolve().parent.parent / "data" / "storyteller"
MODELS_VARIABLE = "FINBACK_MODELS"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model folder and the name it can be called by."""

    name: str
    folder: Path
    model_type: str
    num_bytes: int  # of its .safetensors files


def models_folder() -> Path:
    """Name the folder for models: FINBACK_MODELS, or a place for application data."""
    chosen = os.environ.get(MODELS_VARIABLE)
    return Path(chosen) if chosen else user_data_path("finback") / "models"


def list_models() -> list[LocalModel]:
    """Find every model folder, the embedded model first."""
    return [_describe(name, folder) for name, folder in _candidates()]


def find_model(name: str | Path) -> Path:
    """Give the folder of a model, from a path or from a name in `list_models`.

    Raises:
        CheckpointError: Neither is there; the known names are listed.
    """
    if not str(name):
        raise UsageError("the model's name is empty; give a folder or a name from `finback list`")
    try:
        folder = Path(name).expanduser()
    except RuntimeError:  # `~somebody` who is not a user here
        folder = Path(name)
    if exists(folder):
        return folder
    places = dict(_candidates())
    if str(name) in places:
        return places[str(name)]
    known = ", ".join(places)
    if str(name).count("/") == 1:
        known += f"). To fetch it: hf download {name} --local-dir DIR (then --model DIR"
    raise CheckpointError(
        f"{name}: no such folder, and no model of that name on this machine (there are: {known})"
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    yield "storyteller", STORYTELLER
    own = models_folder()
    if own.is_dir():
        for folder in sorted(own.iterdir()):
            if folder.is_dir():
                yield folder.name, folder
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    for cached in sorted(Path(os.environ.get("HF_HUB_CACHE", home / "hub")).glob("models--*")):
        name = cached.name.removeprefix("models--").replace("--", "/")
        snapshots = sorted(path for path in cached.glob("snapshots/*") if path.is_dir())
        main = _main_revision(cached)
        for folder in snapshots:
            is_main = folder.name == main or len(snapshots) == 1
            yield name if is_main else f"{name}@{folder.name}", folder


def _main_revision(cached: Path) -> str | None:
    """Read which snapshot of a cached model is the main one."""
    try:
        return (cached / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None


def _describe(name: str, folder: Path) -> LocalModel:
    try:
        model_type = str(read_json(folder / "config.json").get("model_type"))
    except CheckpointError:
        model_type = "(no usable config.json)"
    files = [path for path in folder.glob("*.safetensors") if path.exists()]
    return LocalModel(name, folder, model_type, sum(path.stat().st_size for path in files))
