"""llama.cpp's own Kimi K3 graph as the judge, from the `xllamacpp` wheel.

Both run the same folder in float32: the MXFP4 experts are widened first, because llama.cpp's MXFP4
kernels round the activations to 8 bits. Its server gives the log-probability of every token of the
vocabulary, which is the logits up to one constant per position. It runs in a process of its own: it
prints, opens a port and ends the process on an error.

Two paths are compared. "whole": every prefix as a fresh prompt, so that position t comes from one
pass over t tokens. "greedy": the continuation it chooses, token by token from its caches.

    pip install finback[oracle,test]
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from finback import LLM
from finback.checkpoint.formats import Array
from finback.hub.local import STORYTELLER
from tests.conftest import DATA

WANTED = "the independent check needs the oracle extra: pip install finback[oracle]"
pytest.importorskip("gguf", reason=WANTED)
pytest.importorskip("xllamacpp", reason=WANTED)

from finback.bench.gguf_writer import write_gguf  # noqa: E402

ROOT = Path(__file__).parents[2]
# llama.cpp uses an epsilon of 1e-5 in the MLA latent norms and the KDA L2 norm, where K3 has 1e-6:
# with its epsilons the tiny model's logits move by 3e-4.
TOLERANCE = 2e-3
GREEDY_PROMPT, GREEDY_TOKENS = 8, 32
TIMEOUT_S = 120
STORY = (
    "Once upon a time there was a small fox who lived at the edge of a quiet wood. "
    "Every morning she went down to the river, and one day she found a little boat."
)


class Theirs(NamedTuple):
    """What llama.cpp said of one prompt of T tokens."""

    whole: Array  # (T, V): log-probabilities after each prefix
    greedy: Array  # (N, V): the same at each step of the continuation
    chosen: list[int]  # its N tokens: the most likely, but never the end token


def test_tiny_k3(tmp_path: Path) -> None:
    """The fixture with every feature of K3, at the ids of its reference."""
    folder = DATA / "tiny-k3"
    ids = load_file(folder / "reference.safetensors")["input_ids"].tolist()
    compare(folder, ids, tmp_path)


def test_storyteller(tmp_path: Path) -> None:
    """The embedded model, trained weights, at a text of its own kind."""
    with LLM(STORYTELLER) as llm:
        ids = llm.tokenizer.encode(STORY)[:40]
    compare(STORYTELLER, ids, tmp_path)


def compare(folder: Path, ids: list[int], tmp_path: Path) -> None:
    """Check every log-probability and the most likely token of both paths."""
    theirs = ask_llama_cpp(folder, ids, tmp_path)
    with LLM(folder, activations="float32") as llm:
        whole = log_softmax(llm.logits(ids))
        continued = log_softmax(llm.logits(ids[:GREEDY_PROMPT] + theirs.chosen[:-1]))
    greedy = continued[GREEDY_PROMPT - 1 :]
    np.testing.assert_array_equal(whole.argmax(1), theirs.whole.argmax(1))
    np.testing.assert_allclose(whole, theirs.whole, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(greedy.argmax(1), theirs.greedy.argmax(1))
    np.testing.assert_allclose(greedy, theirs.greedy, rtol=0, atol=TOLERANCE)


def log_softmax(logits: Array) -> Array:
    """Normalise each row, in float64."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    out: Array = (shifted - np.log(np.exp(shifted).sum(1, keepdims=True))).astype(np.float32)
    return out


def ask_llama_cpp(folder: Path, ids: list[int], tmp_path: Path) -> Theirs:
    """Convert the folder and run llama.cpp on it in another process."""
    model, prompt, answer = tmp_path / "model.gguf", tmp_path / "ids.json", tmp_path / "answer.npz"
    write_gguf(folder, model)
    prompt.write_text(json.dumps(ids))
    files = [str(model), str(prompt), str(answer)]
    command = [sys.executable, "-m", "tests.oracle.test_llama_cpp", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    log = f"exit code {run.returncode}\n{run.stdout[-1000:]}\n{run.stderr[-3000:]}"
    assert run.returncode == 0, f"llama.cpp did not run this file: {log}"
    with np.load(answer) as arrays:
        return Theirs(arrays["whole"], arrays["greedy"], arrays["chosen"].tolist())


def serve(model: Path, prompt: Path, answer: Path) -> None:
    """Be the other process: load the model, ask for every position, store the answers."""
    import xllamacpp

    ids = json.loads(prompt.read_text())
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 256, 1, 0
    params.warmup, params.no_extra_bufts = False, True
    # One thread: its threads wait for each other by spinning, which crawls on a busy machine.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)

    def ask(tokens: list[int], count: int) -> tuple[Array, list[int]]:
        reply = server.handle_completions(
            {
                "prompt": tokens,
                "max_tokens": count,
                "temperature": 0,
                "n_probs": 1 << 20,  # all; taken before sampling
                "ignore_eos": True,  # the continuation must not end early
                "cache_prompt": False,
            }
        )
        steps = reply["choices"][0]["logprobs"]["content"]
        rows = np.full((len(steps), len(steps[0]["top_logprobs"])), np.nan, np.float32)
        for row, step in zip(rows, steps, strict=True):
            for entry in step["top_logprobs"]:
                row[entry["id"]] = entry["logprob"]
        assert np.isfinite(rows).all(), "not every token has a log-probability"
        return rows, [step["id"] for step in steps]

    whole = np.concatenate([ask(ids[:length], 1)[0] for length in range(1, len(ids) + 1)])
    greedy, chosen = ask(ids[:GREEDY_PROMPT], GREEDY_TOKENS)
    np.savez(answer, whole=whole, greedy=greedy, chosen=np.array(chosen))


if __name__ == "__main__":
    serve(*map(Path, sys.argv[1:]))
