"""Ids as the checkpoint's own tokenizer gives them, and damaged vocabularies refused by line."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HubTokenizer

from finback.errors import TokenizerError
from finback.text.tokenizer import KIMI_PATTERN, JsonTokenizer, load_tokenizer, split_extreme
from tests.conftest import DATA

tokenizer = load_tokenizer(DATA / "tiny-k3")
CASES = json.loads((DATA / "tiny-k3" / "tokenizer_cases.json").read_text())


def test_the_pattern_is_the_published_one() -> None:
    assert CASES["pat_str"] == KIMI_PATTERN


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda c: repr(c["text"][:20]))
def test_ids_in_both_modes(case: dict) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.encode(case["text"], allow_special=True) == case["ids_allow_special"]
    assert tokenizer.decode(case["ids"]) == case["text"]


def test_special_tokens_follow_the_ranks() -> None:
    assert tokenizer.num_tokens == 384 + 256
    assert tokenizer.specials["<|end_of_msg|>"] == 386
    assert tokenizer.specials["<|reserved_token_392|>"] == 392
    assert tokenizer.encode("<|open|>", allow_special=True) == [387]
    assert 387 not in tokenizer.encode("<|open|>")


@given(st.text(max_size=200))
def test_text_comes_back(text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.encode("utf-16", "surrogatepass").decode(
        "utf-16", "replace"
    )


def test_unknown_ids_stand_for_nothing() -> None:
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**9) == b""


def test_extreme_inputs_are_cut_and_nothing_is_lost() -> None:
    text = "a" * 60_001 + " " * 30_000 + "b" * 400_000
    pieces = list(split_extreme(text))
    assert "".join(pieces) == text
    assert [len(p) for p in pieces[:3]] == [25_000, 25_000, 10_001 + 25_000]
    assert max(map(len, pieces)) <= 60_000
    assert list(split_extreme("short  text")) == ["short  text"]


def test_real_cases_where_the_real_vocabulary_is_at_hand() -> None:
    folder = Path(__file__).parents[3] / "shared" / "fixtures"
    if not (folder / "k3-meta" / "tiktoken.model").exists():
        pytest.skip("needs the published tiktoken.model of Kimi K3 in ../shared/fixtures/k3-meta")
    real = load_tokenizer(folder / "k3-meta")
    for case in json.loads((folder / "k3-chat" / "real_tokenizer_cases.json").read_text())["cases"]:
        assert (
            real.encode(case["text"], allow_special=case.get("allow_special", False)) == case["ids"]
        )


def ranks_file(folder: Path, lines: list[bytes]) -> Path:
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    return folder


BYTES = [base64.b64encode(bytes([b])) + b" %d" % b for b in range(256)]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "single bytes"),
        (BYTES[:255], "single bytes"),
        ([*BYTES, b"!!! 256"], "line 257"),
        ([*BYTES, b"YWI="], "line 257"),
        ([*BYTES, b"YWI= 258"], "line 257 must hold a new token of rank 256"),
        ([*BYTES, b"YQ== 256"], "line 257"),
        ([*BYTES, b"YWI= 256 7"], "line 257"),
    ],
)
def test_a_damaged_rank_file_is_refused(tmp_path: Path, lines: list[bytes], says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        load_tokenizer(ranks_file(tmp_path, lines))


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ({"3": {"content": "x"}}, "must lie in 256…511"),
        ({"256": {"content": ""}}, "no content"),
        ({"x": {"content": "y"}}, "no content or no number"),
        ({"256": {"content": "y"}, "257": {"content": "y"}}, "two token ids"),
        ([], "must be an object"),
    ],
)
def test_damaged_special_tokens_are_refused(tmp_path: Path, added: object, says: str) -> None:
    ranks_file(tmp_path, BYTES)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(TokenizerError, match=says):
        load_tokenizer(tmp_path)


def test_no_vocabulary_at_all(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"neither tiktoken.model nor tokenizer.json"):
        load_tokenizer(tmp_path)


def byte_level_file(folder: Path) -> Path:
    """Train a small tokenizer.json, byte level, as most families publish."""
    inner = HubTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s?\S+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(["the whale and the sea and the ship"] * 3, trainer)
    inner.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    inner.save(str(folder / "tokenizer.json"))
    return folder


@given(text=st.text(max_size=100))
def test_a_tokenizer_json_gives_text_back(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "json-tokenizer"
    if not folder.exists():
        folder.mkdir()
        byte_level_file(folder)
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, JsonTokenizer)
    assert loaded.decode(loaded.encode(text)) == text.encode("utf-16", "surrogatepass").decode(
        "utf-16", "replace"
    )


def test_special_strings_of_a_tokenizer_json_in_both_modes(tmp_path: Path) -> None:
    loaded = load_tokenizer(byte_level_file(tmp_path))
    end = loaded.specials["<|im_end|>"]
    assert loaded.encode("a<|im_end|>", allow_special=True)[-1] == end
    assert end not in loaded.encode("a<|im_end|>")
    assert loaded.token_bytes(end) == b"<|im_end|>"
    assert loaded.num_tokens == end + 1


def test_a_damaged_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="not a usable tokenizer.json"):
        load_tokenizer(tmp_path)
