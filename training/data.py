"""Books to token windows: nine parts prose, one part conversations made from the same prose."""

import base64
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HubTokenizer

from finback.text.tokenizer import (
    KIMI_PATTERN,
    JsonTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    read_ranks,
)
from finback.text.xtml import Segment, render
from training.config import NUM_SPECIALS

HELD_OUT = 0.03  # the last part of each file
SPECIAL_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
STRUCTURE = ("<|open|>", "<|close|>", "<|sep|>")  # not marked special in the published file
SUBJECTS = frozenset(
    [
        "fox",
        "dog",
        "wolf",
        "lion",
        "cat",
        "horse",
        "pony",
        "mouse",
        "monkey",
        "bird",
        "crow",
        "cow",
        "donkey",
        "ass",
        "frog",
        "rat",
        "mole",
        "toad",
        "bear",
        "tiger",
        "elephant",
        "boy",
        "girl",
        "child",
        "king",
        "queen",
        "prince",
        "princess",
        "captain",
        "sailor",
        "pirate",
        "doctor",
        "detective",
        "teacher",
        "mother",
        "father",
        "garden",
        "river",
        "forest",
        "wood",
        "sea",
        "ship",
        "boat",
        "island",
        "house",
        "castle",
        "school",
        "train",
        "farm",
        "kitchen",
        "storm",
        "snow",
        "fire",
        "carpet",
        "witch",
        "fairy",
        "dragon",
        "treasure",
        "secret",
        "lantern",
        "mirror",
    ]
)
REQUESTS = (
    "Tell me a story about {}.",
    "Write a short story about {}.",
    "Please tell me a tale about {}.",
    "I would like a story about {}.",
    "Tell me about {}.",
    "Can you tell a story with {} in it?",
)
SYSTEMS = ("You are a storyteller.", "You tell stories.", "Answer with a story.")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token streams of the training and held-out parts, and prose to make conversations from."""

    train: np.ndarray  # int32 (N,)
    valid: np.ndarray  # int32 (M,)
    valid_bytes_per_token: float
    chat: list[np.ndarray]


def train_ranks(texts: list[str], count: int) -> list[bytes]:
    """Learn byte-level BPE over Kimi's pre-tokens; give tokens by rank: bytes, then merges."""
    learner = HubTokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=count, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    from_text = JsonTokenizer(learner)._byte_of
    words = sorted(learner.get_vocab().items(), key=lambda pair: pair[1])
    tokens = [bytes(from_text[c] for c in word) for word, _ in words]
    merges = [token for token in tokens if len(token) > 1]
    return [bytes([b]) for b in range(256)] + merges[: count - 256]


def write_tokenizer(folder: Path, ranks: list[bytes]) -> None:
    """Write `tiktoken.model` and `tokenizer_config.json` as K3 publishes them."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(len(ranks) + n): {"content": name, "special": name not in STRUCTURE, **flags}
        for n, name in SPECIAL_NAMES.items()
    }
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    config = {"added_tokens_decoder": added, **names, "tokenizer_class": "TikTokenTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def open_tokenizer(folder: Path) -> Tokenizer:
    """Read back what `write_tokenizer` wrote."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    ranks = len(read_ranks(folder / "tiktoken.model"))
    assert set(config["added_tokens_decoder"]) <= {
        str(n) for n in range(ranks, ranks + NUM_SPECIALS)
    }
    return TiktokenTokenizer.load(folder / "tiktoken.model", config)


def load_corpus(folder: Path, work: Path, num_ranks: int, seed: int) -> tuple[Corpus, Tokenizer]:
    """Read every `*.txt`, learn (or re-read) the tokenizer in `work`, and encode both parts."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    if not texts:
        raise SystemExit(f"{folder} holds no .txt files; training/README.md names the books")
    parts = [split_held_out(text) for text in texts]
    if not (work / "tokenizer_config.json").exists():
        write_tokenizer(work, train_ranks([train for train, _ in parts], num_ranks))
    tokenizer = open_tokenizer(work)
    separator = tokenizer.encode("\n\n")
    train = [tokenizer.encode(text.strip()) + separator for text, _ in parts]
    valid = [tokenizer.encode(text.strip()) + separator for _, text in parts]
    valid_bytes = sum(len(text.strip().encode()) + 2 for _, text in parts)
    rng = np.random.default_rng(seed)
    chat = [conversation(passage, rng) for text, _ in parts for passage in passages(text, rng)]
    corpus = Corpus(
        np.concatenate([np.array(ids, np.int32) for ids in train]),
        np.concatenate([np.array(ids, np.int32) for ids in valid]),
        valid_bytes / sum(map(len, valid)),
        [np.array(encode_segments(segments, tokenizer), np.int32) for segments in chat],
    )
    return corpus, tokenizer


def split_held_out(text: str) -> tuple[str, str]:
    """Cut the last 3 % off at the start of a paragraph."""
    cut = text.find("\n\n", int(len(text) * (1 - HELD_OUT)))
    return (text[:cut], text[cut:]) if cut > 0 else (text, "")


def passages(text: str, rng: np.random.Generator) -> list[str]:
    """Cut prose into runs of paragraphs of 500 to 1,500 characters; headings start a new one."""
    out: list[str] = []
    run: list[str] = []
    limit = int(rng.integers(500, 1500))
    for paragraph in text.split("\n\n"):
        paragraph = paragraph.strip()
        is_heading = len(paragraph) < 60 and not re.search(r"[.!?\"',;:)-]$", paragraph)
        if not is_heading:
            run.append(paragraph)
        if run and (is_heading or sum(map(len, run)) > limit):
            out.append("\n\n".join(run))
            run, limit = [], int(rng.integers(500, 1500))
    return [passage for passage in out if 200 < len(passage) < 3000]


def subject(passage: str, rng: np.random.Generator) -> str | None:
    """Name what a passage is about: a word from the list, or a name inside a sentence."""
    words = Counter(re.findall(r"[a-z]+", passage.lower()))
    known = [word for word in words if word in SUBJECTS and words[word] > 1]
    names = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}", passage))
    frequent = [name for name, count in names.most_common(2) if count > 1]
    if known and (not frequent or rng.random() < 0.7):
        word = known[int(rng.integers(len(known)))]
        article = "an" if word[0] in "aeiou" else "a"
        return f"{'the' if rng.random() < 0.2 else article} {word}"
    return frequent[0] if frequent else None


def conversation(passage: str, rng: np.random.Generator) -> list[Segment]:
    """Render a request and the passage that answers it in K3's chat format."""
    topic = subject(passage, rng)
    first = re.match(r".{20,160}?[.!?]\"? ", passage, re.DOTALL)
    if topic is not None:
        request, answer = REQUESTS[int(rng.integers(len(REQUESTS)))].format(topic), passage
    elif first is not None and rng.random() < 0.5:
        request, answer = f"Continue this story: {first[0].strip()}", passage[first.end() :]
    else:
        request, answer = (
            ("Tell me a story.", "Please tell me a story.")[int(rng.integers(2))],
            passage,
        )
    messages: list[dict[str, Any]] = [{"role": "user", "content": request}]
    if rng.random() < 0.3:
        system = SYSTEMS[int(rng.integers(len(SYSTEMS)))]
        messages.insert(0, {"role": "system", "content": system})
    messages.append({"role": "assistant", "content": answer})
    thinking = bool(rng.random() < 0.6)
    effort = ("max", "low", "high", None)[int(rng.choice(4, p=[0.4, 0.1, 0.1, 0.4]))]
    return render(messages, thinking=thinking, thinking_effort=effort, add_generation_prompt=False)


def encode_segments(segments: list[Segment], tokenizer: Tokenizer) -> list[int]:
    """Tokenise each segment on its own and join the ids."""
    ids: list[int] = []
    for text, is_special in segments:
        ids += tokenizer.encode(text, allow_special=is_special)
    return ids


def batch(corpus: Corpus, step: int, seed: int, rows: int, length: int) -> np.ndarray:
    """Draw the windows of one step, int64 (rows, length + 1): a pure function of seed and step."""
    rng = np.random.default_rng((seed, step))
    out = np.empty((rows, length + 1), np.int64)
    for row in out:
        if rng.random() < 0.1 and corpus.chat:
            filled = 0
            while filled < len(row):
                talk = corpus.chat[int(rng.integers(len(corpus.chat)))][: len(row) - filled]
                row[filled : filled + len(talk)] = talk
                filled += len(talk)
        else:
            start = int(rng.integers(len(corpus.train) - length - 1))
            row[:] = corpus.train[start : start + length + 1]
    return out
