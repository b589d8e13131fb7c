"""Train the storyteller: `python -m training.storyteller --corpus DIR --out DIR`.

Interrupt it at any time and run the same command again: it goes on from its last saved state.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training import data, model
from training.config import NUM_RANKS, checkpoint_config
from training.export import write_checkpoint
from training.model import Storyteller
from training.optim import Muon

MUON_LR, ADAM_LR, WARMUP = 6e-3, 4e-3, 40
QUANTISED_PART = 0.25  # experts are rounded to MXFP4 in this last part of the run
VALID_WINDOWS = 48


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of .txt files")
    parser.add_argument(
        "--out", type=Path, required=True, help="state, log and finished checkpoint"
    )
    parser.add_argument("--steps", type=int, help="2,000; 30 with --smoke")
    parser.add_argument("--rows", type=int, help="sequences a step; 8, or 2")
    parser.add_argument("--length", type=int, help="tokens each, a multiple of 16; 512, or 64")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--compile", action="store_true", help="compile the blocks; a minute to start"
    )
    parser.add_argument("--smoke", action="store_true", help="a toy shape, to test the recipe")
    args = parser.parse_args(argv)
    for name, usual, small in (("steps", 2000, 30), ("rows", 8, 2), ("length", 512, 64)):
        if getattr(args, name) is None:
            setattr(args, name, small if args.smoke else usual)
    return args


def main(argv: list[str] | None = None) -> None:
    """Train to the last step, then write the checkpoint into `out/checkpoint`."""
    args = parse_args(argv)
    net, config, corpus = train_until(args, args.steps)
    report = finish(net, corpus, args)
    report["tensor_bytes"] = write_checkpoint(net, config, args.out / "checkpoint")
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


def train_until(
    args: argparse.Namespace, last: int
) -> tuple[Storyteller, dict[str, Any], data.Corpus]:
    """Prepare the corpus, build or restore the model, and run the steps up to `last`."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    ranks = 512 if args.smoke else NUM_RANKS
    shape = {"hidden": 64, "layers": 4, "experts": 8} if args.smoke else {}
    config = checkpoint_config(ranks=ranks, **shape)
    folder = args.out / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    corpus, _ = data.load_corpus(args.corpus, folder, ranks, args.seed)
    if min(len(corpus.train), len(corpus.valid)) <= args.length + 1:
        raise SystemExit(
            f"the corpus is too small: {len(corpus.train)} tokens, {len(corpus.valid)} held out; "
            f"each part needs more than --length {args.length}"
        )
    print(f"{len(corpus.train)} training tokens, {len(corpus.chat)} conversations", flush=True)
    net = Storyteller(config).to(args.device)
    if args.compile:
        compile_blocks()
    train(net, corpus, args, last)
    return net, config, corpus


def compile_blocks() -> None:
    """Fuse the element-wise parts, which otherwise cost more than the matrix products."""
    for block in (model.Kda, model.Mla, model.Mix, model.Mlp):
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    model.situ = torch.compile(model.situ)


def train(net: Storyteller, corpus: data.Corpus, args: argparse.Namespace, last: int) -> None:
    """Run the steps up to `last`, saving the state about every five minutes."""
    hidden = [p for n, p in net.named_parameters() if p.ndim >= 2 and is_hidden(n)]
    others = [p for n, p in net.named_parameters() if not (p.ndim >= 2 and is_hidden(n))]
    optimizers = [Muon(hidden, MUON_LR), torch.optim.Adam(others, ADAM_LR, betas=(0.9, 0.95))]
    rates = (MUON_LR, ADAM_LR)
    step, seconds = restore(net, optimizers, args)
    saved = started = time.monotonic()
    while step < last:
        factor = schedule(step, args.steps)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        for moe in net.moes:
            moe.quantised = step >= args.steps * (1 - QUANTISED_PART)
        ids = torch.from_numpy(data.batch(corpus, step, args.seed, args.rows, args.length)).to(
            args.device
        )
        loss = loss_of(net, ids)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        worst = max((moe.balance(4e-3 * factor) for moe in net.moes), default=0.0)
        step += 1
        now = time.monotonic()
        if step % 10 == 0 or step == last:
            spent = seconds + now - started
            print(
                f"step {step} loss {loss.item():.4f} norm {norm:.2f} "
                f"load {worst:.1f} seconds {spent:.0f}",
                flush=True,
            )
        if now - saved > 300 or step == last:
            save(net, optimizers, step, seconds + now - started, args)
            saved = now
        if step % 200 == 0:
            print(f"  held out: {bits_per_byte(net, corpus, args):.4f} bits per byte", flush=True)


def is_hidden(name: str) -> bool:
    """Tell the matrices between embedding and head from everything else."""
    return not any(part in name for part in ("embed", "lm_head", "conv1d", "_res.", "gate.weight"))


def schedule(step: int, steps: int) -> float:
    """Warm up, then go down in a line to a twentieth."""
    return min((step + 1) / WARMUP, 1.0 - 0.95 * step / steps)


def loss_of(net: Storyteller, ids: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats a token."""
    logits = net(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(net: Storyteller, corpus: data.Corpus, args: argparse.Namespace) -> float:
    """Measure the held-out part on evenly spaced windows."""
    length = args.length
    starts = np.linspace(0, len(corpus.valid) - length - 1, VALID_WINDOWS).astype(int)
    windows = np.stack([corpus.valid[s : s + length + 1] for s in starts]).astype(np.int64)
    losses = []
    for rows in np.array_split(windows, max(1, VALID_WINDOWS // args.rows)):
        losses.append(loss_of(net, torch.from_numpy(rows).to(args.device)).item() * len(rows))
    for moe in net.moes:
        moe.load.zero_()
    return sum(losses) / VALID_WINDOWS / math.log(2) / corpus.valid_bytes_per_token


def finish(net: Storyteller, corpus: data.Corpus, args: argparse.Namespace) -> dict[str, Any]:
    """Measure with and without rounding the experts."""
    out: dict[str, Any] = {
        "steps": args.steps,
        "seed": args.seed,
        "tokens": args.steps * args.rows * args.length,
    }
    for name, rounded in (("float32_experts", False), ("mxfp4_experts", True)):
        for moe in net.moes:
            moe.quantised = rounded
        out[f"bits_per_byte_{name}"] = round(bits_per_byte(net, corpus, args), 4)
    return out


def restore(net: Storyteller, optimizers: list[Any], args: argparse.Namespace) -> tuple[int, float]:
    """Load the last saved state, if there is one; give its step and the seconds spent."""
    path = args.out / "state.pt"
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, map_location=args.device, weights_only=True)
    net.load_state_dict(state["net"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    print(f"resumed at step {state['step']}", flush=True)
    return state["step"], state["seconds"]


def save(
    net: Storyteller, optimizers: list[Any], step: int, seconds: float, args: argparse.Namespace
) -> None:
    """Write the state beside the old one, then replace it."""
    state = {
        "net": net.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "seconds": seconds,
    }
    torch.save(state, args.out / "state.tmp")
    (args.out / "state.tmp").replace(args.out / "state.pt")


if __name__ == "__main__":
    main()
