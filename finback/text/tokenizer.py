"""Token ids from text and bytes from token ids, for both kinds of published vocabulary.

`tiktoken.model` holds byte strings by rank (Kimi); `tokenizer.json` is read by `tokenizers`.
"""

import base64
import binascii
import itertools
import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Protocol

import tiktoken
from tokenizers import Tokenizer as HubTokenizer

from finback.checkpoint.files import exists, read_file, read_json_if_there
from finback.errors import TokenizerError

# Kimi's pre-token pattern: protocol data of the checkpoint's own tokenizer.
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
NUM_KIMI_SPECIALS = 256
# Kimi cuts extreme inputs here, so that ids agree with its own tokenizer.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
MAX_VOCAB_FILE_BYTES = 256 << 20


class Tokenizer(Protocol):
    """What the rest of the package asks of a vocabulary."""

    @property
    def num_tokens(self) -> int:
        """Count all ids, special ones included."""
        ...

    @property
    def specials(self) -> Mapping[str, int]:
        """Map the special strings to their ids."""
        ...

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Turn text into ids; special strings count as ordinary text unless allowed."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes one id stands for. Unknown ids stand for nothing."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Turn ids into text; what is not UTF-8 becomes U+FFFD."""
        ...


class TiktokenTokenizer:
    """A `tiktoken.model` of ranks with the 256 special ids that follow them."""

    def __init__(self, ranks: dict[bytes, int], special_names: Mapping[int, str]) -> None:
        """Build from ranks 0…n-1 and the names of special ids; unnamed ones are reserved."""
        first = len(ranks)
        self.specials: dict[str, int] = {}
        for token_id in range(first, first + NUM_KIMI_SPECIALS):
            name = special_names.get(token_id, f"<|reserved_token_{token_id}|>")
            if self.specials.setdefault(name, token_id) != token_id:
                raise TokenizerError(f"special string {name!r} is given to two token ids")
        self.num_tokens = first + NUM_KIMI_SPECIALS
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=self.specials
        )

    @classmethod
    def load(cls, ranks_path: Path, config: Mapping[str, object]) -> "TiktokenTokenizer":
        """Read a rank file and the `added_tokens_decoder` of a `tokenizer_config.json`.

        Raises:
            TokenizerError: A line, rank or special token is not what it should be.
        """
        ranks = read_ranks(ranks_path)
        return cls(ranks, special_names(config, len(ranks), ranks_path.parent))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Turn text into ids; special strings count as ordinary text unless allowed."""
        ids: list[int] = []
        for piece in split_extreme(text):
            if allow_special:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes one id stands for. Unknown ids stand for nothing."""
        if not 0 <= token_id < self.num_tokens:
            return b""
        return self._encoding.decode_single_token_bytes(token_id)

    def decode(self, token_ids: list[int]) -> str:
        """Turn ids into text; what is not UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A `tokenizer.json`, as most families publish it."""

    def __init__(self, inner: HubTokenizer) -> None:
        """Wrap a loaded tokenizer of the `tokenizers` library."""
        self._inner = inner
        inner.no_padding()
        inner.no_truncation()
        added = inner.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.specials = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        self.num_tokens = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        decoder = json.loads(inner.to_str()).get("decoder") or {}
        parts = [decoder, *(decoder.get("decoders") or [])]
        self._byte_level = any(part.get("type") == "ByteLevel" for part in parts)

    @classmethod
    def load(cls, path: Path) -> "JsonTokenizer":
        """Read a `tokenizer.json`.

        Raises:
            TokenizerError: The library refuses the file.
        """
        text = read_file(path, MAX_VOCAB_FILE_BYTES).decode("utf-8", errors="replace")
        with _library_errors(f"{path}: not a usable tokenizer.json"):
            return cls(HubTokenizer.from_str(text))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Turn text into ids; special strings count as ordinary text unless allowed."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self._inner.encode_special_tokens = not allow_special
        with _library_errors("tokenizer.json cannot encode this text"):
            ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes one id stands for. Unknown ids stand for nothing."""
        if token_id in self._added:
            return self._added[token_id]
        token = self._inner.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            return bytes(self._byte_of[c] for c in token if c in self._byte_of)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    def decode(self, token_ids: list[int]) -> str:
        """Turn ids into text; what is not UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Map the printable stand-ins of byte-level BPE (GPT-2) back to bytes."""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in set(printable)]
        table = {chr(b): b for b in printable}
        return table | {chr(256 + n): b for n, b in enumerate(others)}


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Turn whatever the library raises into our error; its panics are no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{what} ({error})") from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the vocabulary beside a checkpoint, whichever kind it is.

    Raises:
        TokenizerError: There is none, or it is damaged.
    """
    config = read_tokenizer_config(folder)
    if exists(folder / "tiktoken.model"):
        return TiktokenTokenizer.load(folder / "tiktoken.model", config)
    if exists(folder / "tokenizer.json"):
        return JsonTokenizer.load(folder / "tokenizer.json")
    raise TokenizerError(
        f"{folder}: neither tiktoken.model nor tokenizer.json is there. "
        "Download the vocabulary files of the model into this folder."
    )


def read_tokenizer_config(folder: Path) -> dict[str, object]:
    """Read `tokenizer_config.json`; a missing file is an empty one."""
    return read_json_if_there(folder / "tokenizer_config.json")


def token_text(value: object) -> str | None:
    """Read a token as configs give it: a string, or an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read `<base64> <rank>` lines: ranks 0, 1, 2 … in order, every single byte among them.

    Raises:
        TokenizerError: Naming the first line that is wrong.
    """
    lines = read_file(path, MAX_VOCAB_FILE_BYTES).splitlines()
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines):
        fields = line.split()
        try:
            token, rank = base64.b64decode(fields[0], validate=True), int(fields[1][:20])
        except (binascii.Error, ValueError, IndexError):
            raise TokenizerError(f"{path}: line {number + 1} is not '<base64> <rank>'") from None
        if len(fields) != 2 or rank != number or not token or token in ranks:
            raise TokenizerError(
                f"{path}: line {number + 1} must hold a new token of rank {number}"
            )
        ranks[token] = rank
    if any(bytes([b]) not in ranks for b in range(256)):
        raise TokenizerError(f"{path}: some single bytes have no rank, so some text has no ids")
    return ranks


def special_names(config: Mapping[str, object], first: int, folder: Path) -> dict[int, str]:
    """Read the names of special ids from a `tokenizer_config.json`.

    Raises:
        TokenizerError: An entry lies outside the special ids or has no name.
    """
    names: dict[int, str] = {}
    added = config.get("added_tokens_decoder")
    added = {} if added is None else added
    where = folder / "tokenizer_config.json"
    if not isinstance(added, dict):
        raise TokenizerError(f"{where}: added_tokens_decoder must be an object")
    for key, value in added.items():
        content = value.get("content") if isinstance(value, dict) else None
        if not re.fullmatch("[0-9]{1,9}", key) or not isinstance(content, str) or not content:
            raise TokenizerError(
                f"{where}: added token {reprlib.repr(key)} has no content or no number"
            )
        if not content.isascii() and any("\ud800" <= c <= "\udfff" for c in content):
            raise TokenizerError(f"{where}: added token {key} is no valid text")
        if not first <= int(key) < first + NUM_KIMI_SPECIALS:
            raise TokenizerError(
                f"{where}: added token {key} ({content!r}) must lie in "
                f"{first}…{first + NUM_KIMI_SPECIALS - 1}"
            )
        names[int(key)] = content
    return names


def split_extreme(text: str) -> Iterator[str]:
    """Cut text as Kimi's tokenizer does: every 400,000 characters, and inside runs over 25,000.

    A run is consecutive whitespace, or consecutive non-whitespace.
    """
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        if len(piece) <= MAX_RUN_CHARS:
            yield piece
            continue
        begin = position = 0
        for _, run in itertools.groupby(piece, str.isspace):
            length = sum(1 for _ in run)
            for cut in range(MAX_RUN_CHARS, length, MAX_RUN_CHARS):
                yield piece[begin : position + cut]
                begin = position + cut
            position += length
        yield piece[begin:]
