"""The recipe at a toy shape, corpus to checkpoint: the engine computes what training computed."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="needs the training extra: pip install finback[training]"
)

from finback import LLM  # noqa: E402
from tests.conftest import DATA  # noqa: E402
from training import mxfp4, storyteller  # noqa: E402
from training.config import checkpoint_config  # noqa: E402
from training.model import Storyteller  # noqa: E402


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some prose made of this repository's own words."""
    folder = tmp_path_factory.mktemp("corpus")
    readme = (DATA.parents[1] / "LICENSE").read_text()
    story = "\n\n".join(
        f'The Fox and the Crow\n\nOnce a fox met a crow. "Crow," said the fox, "give me {n}."'
        " The crow kept the cheese and the fox went home, and the fox was hungry all night long."
        for n in range(60)
    )
    (folder / "a.txt").write_text(readme)
    (folder / "b.txt").write_text(story)
    return folder


def command(corpus: Path, out: Path, steps: int) -> list[str]:
    small = ["--smoke", "--rows", "2", "--length", "64", "--threads", "1"]
    return ["--corpus", str(corpus), "--out", str(out), "--steps", str(steps), *small]


def test_the_recipe_makes_a_checkpoint_that_the_engine_runs_alike(
    corpus: Path, tmp_path: Path
) -> None:
    storyteller.main(command(corpus, tmp_path, 30))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["bits_per_byte_mxfp4_experts"] < 6.5
    folder = tmp_path / "checkpoint"
    config = json.loads((folder / "config.json").read_text())
    net = Storyteller(config)
    net.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)["net"])
    with torch.no_grad():
        for parameter in net.parameters():  # what export rounds, experts apart
            parameter.copy_(parameter.bfloat16().float())
        state = torch.load(tmp_path / "state.pt", weights_only=True)["net"]
        for name, parameter in net.named_parameters():
            if any(
                part in name
                for part in ("conv1d", "A_log", "dt_bias", "o_norm", ".w1", ".w2", ".w3")
            ):
                parameter.copy_(state[name])
    for moe in net.moes:
        moe.quantised = True
    ids = np.arange(64) * 7 % 512
    with torch.no_grad():
        expected = net(torch.from_numpy(ids)[None])[0].numpy()
    with LLM(folder) as llm:
        logits = llm.logits(ids.tolist())
        assert np.abs(logits - expected).max() < 1e-3
        assert (logits.argmax(-1) == expected.argmax(-1)).all()
        assert llm.chat([{"role": "user", "content": "Tell me a story."}], max_tokens=4).token_ids


def test_an_interrupted_run_ends_with_the_same_weights(corpus: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    storyteller.main(command(corpus, whole, 6))
    args = storyteller.parse_args(command(corpus, parts, 6))
    storyteller.train_until(args, 3)
    storyteller.main(command(corpus, parts, 6))
    a, b = (torch.load(f / "state.pt", weights_only=True)["net"] for f in (whole, parts))
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_rounding_is_to_the_nearest_value_and_read_back_by_the_engine() -> None:
    from finback.checkpoint.formats import Weight, unpack

    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    codes, scale, rounded = mxfp4.encode(weight)
    parts = tuple(t.numpy().reshape(-1) for t in (mxfp4.pack(codes), scale))
    np.testing.assert_array_equal(unpack(Weight("mxfp4", (6, 64), parts)), rounded.numpy())
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = (
        np.concatenate([table, -table])[None, None]
        * np.exp2(scale.numpy().astype(int) - 127.0)[..., None]
    )
    groups = weight.numpy().reshape(6, 2, 32)
    best = np.abs(groups[..., None] - values[:, :, None, :]).min(-1)
    np.testing.assert_allclose(np.abs(groups - rounded.numpy().reshape(6, 2, 32)), best, atol=1e-7)


def test_the_config_is_in_the_published_layout() -> None:
    config = checkpoint_config()
    assert config["model_type"] == "kimi_k3"
    assert config["text_config"]["model_type"] == "kimi_linear"
    assert config["text_config"]["linear_attn_config"]["full_attn_layers"] == [4, 8]
