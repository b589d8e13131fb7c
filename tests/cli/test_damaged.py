"""Every way a checkpoint can be wrong: exit 3, one sentence, no traceback, nothing allocated."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from finback.checkpoint.index import INDEX
from tests.conftest import edit_json, header_of

SHARD = "model-00003-of-000011.safetensors"
# More than the interpreter with NumPy and the tokenizers, far less than any absurd size.
ADDRESS_SPACE = 3 << 30


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that could not allocate much if it tried."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "finback",
            "run",
            "--model",
            str(folder),
            "--raw",
            "--max-tokens",
            "2",
            "x",
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=30,
        env={"OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE)),
    )


def rewrite(path: Path, change: Callable[[dict], None]) -> None:
    """Change a shard's header, keeping its data."""
    header, data = header_of(path)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def cut(folder: Path) -> None:
    raw = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(raw[:-1000])


def long_header(folder: Path) -> None:
    raw = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes((2**50).to_bytes(8, "little") + raw[8:])


def duplicate(folder: Path) -> None:
    name = "language_model.model.norm.weight"
    entry, data = {"dtype": "BF16", "shape": [128], "data_offsets": [0, 256]}, b"\0" * 256
    text = json.dumps({name: entry}).encode()
    (folder / "extra.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["extra"] = "extra.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def wrong_dtype(folder: Path) -> None:
    def change(header: dict) -> None:
        header["language_model.model.layers.2.input_layernorm.weight"]["dtype"] = "I16"

    rewrite(folder / SHARD, change)


def wrong_shape(folder: Path) -> None:
    def change(header: dict) -> None:
        header["language_model.model.layers.2.self_attn.q_proj.weight"]["shape"] = [128, 160]

    rewrite(folder / SHARD, change)


def bad_scale(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        header, data = header_of(path)
        raw = bytearray(path.read_bytes())
        for name, entry in header.items():
            if name.endswith("w2.weight_scale"):
                raw[len(raw) - len(data) + entry["data_offsets"][0]] = 255
        path.write_bytes(raw)


def traversal(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["x"] = "../../x.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def broken_link(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to("nowhere")


def missing_tensor(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["language_model.lm_head.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    shard = folder / "model-00010-of-000011.safetensors"
    header, data = header_of(shard)
    entry = header.pop("language_model.lm_head.weight")
    header["other"] = entry
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data)


def pipe(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def device(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero")

    return damage


def nan_norm(folder: Path) -> None:
    shard = folder / "model-00010-of-000011.safetensors"
    header, data = header_of(shard)
    start, end = header["language_model.model.norm.weight"]["data_offsets"]
    raw = bytearray(shard.read_bytes())
    at = len(raw) - len(data)
    raw[at + start : at + end] = b"\xc0\x7f" * ((end - start) // 2)
    shard.write_bytes(raw)


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def write(name: str, raw: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(raw) and None


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut shard": (cut, "cut short: its header describes"),
    "header longer than the file": (long_header, "the header claims 1125899906842624 bytes"),
    "zero-length file": (write(SHARD, b""), "only 0 bytes"),
    "broken config": (write("config.json", b"{"), "config.json: not valid JSON"),
    "config is a list": (write("config.json", b"[]"), "must hold a JSON object"),
    "broken index": (write(INDEX, b"\xff"), "not valid JSON"),
    "index without map": (write(INDEX, b"{}"), "weight_map must be an object"),
    "broken generation config": (
        write("generation_config.json", b"nope"),
        "generation_config.json: not valid JSON",
    ),
    "broken vocabulary": (write("tiktoken.model", b"nope"), "tiktoken.model: line 1"),
    "missing vocabulary": (lambda f: (f / "tiktoken.model").unlink(), "neither tiktoken.model nor"),
    "missing shard": (lambda f: (f / SHARD).unlink(), "experts.[0-15].w1.weight_packed"),
    "missing config": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "missing tensor": (
        missing_tensor,
        "1 tensors of the model are missing: language_model.lm_head.weight",
    ),
    "tensor in two files": (duplicate, "is in two files"),
    "dtype against the config": (wrong_dtype, "input_layernorm.weight is I16"),
    "shape against the config": (
        wrong_shape,
        "q_proj.weight has shape [128, 160], the config says [160, 128]",
    ),
    "config against the shapes": (config(text_config__hidden_size=256), "the config says"),
    "scale byte 255": (bad_scale, "w2.weight_scale holds a scale that stands for no number"),
    "unknown model_type": (
        config(model_type="gpt9"),
        "model_type 'gpt9' is not supported; finback runs kimi_k3",
    ),
    "model_type is a path": (config(model_type="../x"), "is not supported"),
    "no model_type": (config(model_type=None), "model_type None is not supported"),
    "absurd width": (
        config(text_config__hidden_size=10**15),
        "hidden_size must be a whole number from 1 to",
    ),
    "absurd layers": (config(text_config__num_hidden_layers=10**9), "num_hidden_layers must be"),
    "absurd experts": (config(text_config__num_experts=10**9), "num_experts must be"),
    "width of zero": (config(text_config__hidden_size=0), "hidden_size must be"),
    "text for a number": (config(text_config__kv_lora_rank="many"), "kv_lora_rank must be"),
    "missing key": (config(text_config__kv_lora_rank=None), "kv_lora_rank must be a whole number"),
    "top-k above the experts": (
        config(text_config__num_experts_per_token=17),
        "num_experts_per_token must be",
    ),
    "layer map with a hole": (
        config(text_config__linear_attn_config__kda_layers=[1]),
        "name each layer from 1 to 9",
    ),
    "unknown activation": (
        config(text_config__hidden_act="gelu"),
        "hidden_act must be silu or situ",
    ),
    "path out of the folder": (traversal, "no file of this folder"),
    "broken link": (broken_link, f"files are missing ({SHARD})"),
    "more layers and experts than tensors": (
        config(text_config__num_experts=65536, text_config__num_experts_per_token=4),
        "tensors that are not there, the checkpoint names 1004",
    ),
    "infinite total": (
        lambda f: (
            (f / INDEX).write_text(
                (f / INDEX).read_text().replace('"total_size"', '"total_size": Infinity, "x"')
            )
            and (f / SHARD).unlink()
        ),
        "1 of 11 files are missing",
    ),
    "expert number of 5000 digits": (
        lambda f: edit_json(
            f / INDEX, **{"weight_map__x.experts." + "9" * 5000 + ".w": "model-1.safetensors"}
        ),
        "1 of 12 files are missing (model-1.safetensors)",
    ),
    "huge temperature": (
        write("generation_config.json", b'{"temperature": 1' + b"0" * 400 + b"}"),
        "generation_config.json: temperature must be a number from 0 to 100",
    ),
    "stop id outside the vocabulary": (
        write("generation_config.json", b'{"eos_token_id": 640}'),
        "generation_config.json: eos_token_id must be ids below 640",
    ),
    "stop id of a wrong type": (
        write("generation_config.json", b'{"eos_token_id": "x"}'),
        "eos_token_id must be ids below 640",
    ),
    "added token of 5000 digits": (
        write("tokenizer_config.json", b'{"added_tokens_decoder": {"' + b"9" * 5000 + b'": {}}}'),
        "has no content or no number",
    ),
    "added token that is no text": (
        write(
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"390": {"content": "\\ud800"}}}',
        ),
        "added token 390 is no valid text",
    ),
    "tokenizer of another model": (
        config(text_config__vocab_size=512),
        "embed_tokens.weight has shape [640, 128], the config says [512, 128]",
    ),
    "columns that MXFP4 cannot have": (
        config(text_config__moe_intermediate_size=97),
        "needs a multiple of 32",
    ),
    "a pipe for a config": (pipe("config.json"), "config.json: is no regular file"),
    "a pipe for a shard": (pipe(SHARD), f"{SHARD}: is no regular file"),
    "a device for a config": (device("tokenizer_config.json"), "is no regular file"),
    "a folder for a vocabulary": (
        lambda f: (f / "tiktoken.model").unlink() or (f / "tiktoken.model").mkdir(),
        "tiktoken.model: is no regular file",
    ),
    "a name of 5000 characters": (
        lambda f: edit_json(f / INDEX, weight_map__x="x" * 5000 + ".safetensors"),
        "1 of 12 files are missing",
    ),
    "escapes and newlines in a name": (
        lambda f: edit_json(f / INDEX, weight_map__x="gone\n\x1b[2J.safetensors"),
        "(gone\\n\\x1b[2J.safetensors)",
    ),
    "a value of a megabyte": (
        config(text_config__hidden_size="9" * 1_000_000),
        "hidden_size must be a whole number from 1 to 16777216, not '999",
    ),
    "weights that are no numbers": (nan_norm, "model.norm.weight holds values that are no numbers"),
    "another choice of experts": (config(text_config__topk_method="greedy"), "must be noaux_tc"),
    "nested text_config missing": (config(text_config=None), "text_config must be an object"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_sentence_and_exit_3(broken: Path, fault: str) -> None:
    damage, says = FAULTS[fault]
    damage(broken)
    done = run(broken)
    assert done.returncode == 3, done.stderr
    *start, sentence = done.stderr.splitlines()
    assert sentence.startswith("finback: ")
    assert says in sentence
    assert len(start) <= 1  # what loaded, where the fault lies in an expert
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_read_only_folder_is_fine(broken: Path) -> None:
    for path in [*broken.iterdir(), broken]:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        done = run(broken)
        assert done.returncode == 0, done.stderr
    finally:
        broken.chmod(0o755)


def test_a_folder_that_is_none() -> None:
    done = run(Path("/nonexistent/model"))
    assert done.returncode == 3
    assert "no such folder, and no model of that name on this machine (there are: " in done.stderr


def test_an_unreadable_file_is_named(broken: Path) -> None:
    (broken / SHARD).unlink()
    (broken / SHARD).mkdir()
    done = run(broken)
    assert done.returncode == 3, done.stderr
    assert SHARD in done.stderr
    shutil.rmtree(broken / SHARD)
