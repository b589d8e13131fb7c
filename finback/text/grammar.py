"""What an answer must look like: JSON schemas, regular expressions, choices, Lark grammars.

The grammars are llguidance's. They are compiled before anything is computed, so that what cannot be
met or is not supported is refused at once.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from finback.checkpoint.formats import Mask
from finback.config import SamplingParams
from finback.errors import RequestError
from finback.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# As json.dumps writes it: no choice of white space, so that keys are not sampled.
JSON_STYLE: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
KINDS = ("json_schema", "regex", "choice", "grammar")


class Guide:
    """Follows one answer through a grammar; see `engine.sequence.Constraint`."""

    def __init__(self, matcher: "LLMatcher", size: int, ends: frozenset[int]) -> None:
        """Start at the beginning.

        Args:
            matcher: Has taken in nothing.
            size: Of the vocabulary.
            ends: Tokens by which a model ends an answer; allowed where the grammar is complete.
        """
        self._matcher, self._size, self._ends = matcher, size, ends

    def allowed(self) -> Mask:
        """Tell which tokens (V,) may come next.

        Raises:
            RequestError: The grammar has become too large to follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._refuse_error()
        return np.unpackbits(bits, bitorder="little", count=self._size).view(bool)

    def accept(self, token: int) -> bool:
        """Take a token in; true when nothing can follow any more."""
        if token in self._ends:
            return True
        self._matcher.consume_token(token)
        self._refuse_error()
        return bool(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        """Give the tokens that must come next, if there is no choice. They are not accepted yet."""
        return list(self._matcher.compute_ff_tokens())

    def _refuse_error(self) -> None:
        if error := self._matcher.get_error():
            raise RequestError(f"the answer cannot be held to its format: {_first_line(error)}")


class Grammars:
    """Compiles constraints for one vocabulary, which is prepared when it is first needed."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """Take a tokenizer and the number of tokens that the model knows, which may be more."""
        self._tokenizer, self._size = tokenizer, size
        self._prepared: dict[frozenset[int], LLTokenizer] = {}

    def guide(self, params: SamplingParams, ends: frozenset[int]) -> Guide | None:
        """Compile what a request asks for; None if it asks for nothing.

        Args:
            params: Has at most one of `json_schema`, `regex`, `choice` and `grammar`.
            ends: Tokens by which the model ends an answer.

        Raises:
            RequestError: Naming what is wrong with it, or what is not supported.
        """
        kind = next((name for name in KINDS if getattr(params, name) is not None), None)
        if kind is None:
            return None
        if not ends:
            raise RequestError(f"{kind}: the model names no token that ends an answer")
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary(ends), _compile(kind, params), log_level=0)
        if error := matcher.get_error():
            raise RequestError(f"{kind} cannot be used: {_first_line(error)}")
        return Guide(matcher, self._size, ends)

    def _vocabulary(self, ends: frozenset[int]) -> "LLTokenizer":
        if ends not in self._prepared:
            from llguidance import LLTokenizer, TokenizerWrapper

            inner = _Vocabulary(self._tokenizer, sorted(ends))
            self._prepared[ends] = LLTokenizer(
                TokenizerWrapper(inner), n_vocab=self._size, eos_token=sorted(ends)
            )
        return self._prepared[ends]


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted(tokenizer.specials.values())
        self.tokens = [tokenizer.token_bytes(n) for n in range(tokenizer.num_tokens)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode())


def _compile(kind: str, params: SamplingParams) -> str:
    from llguidance import LLMatcher

    if kind == "json_schema":
        schema = {} if params.json_schema is True else params.json_schema
        if schema is False:
            raise RequestError("json_schema false allows no answer at all")
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return str(LLMatcher.grammar_from_json_schema(text, overrides=JSON_STYLE))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"json_schema is no JSON: {_first_line(str(error))}") from error
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(params.regex or ""))
    if kind == "choice":
        quoted = (json.dumps(choice, ensure_ascii=False) for choice in params.choice or ())
        return str(LLMatcher.grammar_from_lark(f"start: {' | '.join(quoted)}"))
    return str(LLMatcher.grammar_from_lark(params.grammar or ""))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
