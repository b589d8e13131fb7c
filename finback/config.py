"""Options of a run: frozen, checked once when made. Light to import."""

import dataclasses
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar, get_args

from finback.errors import RequestError, UsageError
from finback.units import parse_bytes

MAX_THREADS = 4096
MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
SEQUENCES = 64  # computed together, where memory allows and nothing else is asked for
T = TypeVar("T")
Activations = Literal["float32", "int16", "int8"]
DEFAULT_ACTIVATIONS: Activations = "int16"
POLICY_NAMES = ("distance", "frequency", "pinned", "recency")
DEFAULT_POLICY = "distance"
DRAFT_NAMES = ("off", "lookup")
MAY_BE_NONE = (
    "keep_every",
    "threads",
    "context",
    "expert_slots",
    "max_rows",
    "max_sequences",
    "prompt_rows",
    "resident_sequences",
)


def with_known_options(cls: type[T], options: Mapping[str, Any], error: type[Exception]) -> T:
    """Make a dataclass from keyword options, refusing unknown names with the known ones listed."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise error(f"unknown option {name!r}; choose from {', '.join(known)}")
    return cls(**options)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine may use the machine. Only `activations` and `spine` change a result."""

    max_rows: int | None = None  # tokens of one pass over the layers; what saves reads if None
    max_sequences: int | None = None  # computed together; 64 if there is memory, if None
    # States of sequences that were asked for and do not fit into memory go to a file in the folder
    # of states, layer by layer, in every step; without, fewer sequences run together.
    spill: bool = True
    resident_sequences: int | None = None  # whose states stay in memory; what fits if None
    max_spill_writes: str | None = None  # bytes, as 200GB; after that no further state is spilled
    prompt_rows: int | None = (
        None  # of prompts in a step that an answer waits for; no limit if None
    )
    context: int | None = None  # tokens of one sequence; 16,384 or what the model holds if less
    # Everything this process may hold: `4GiB`, `50%` of the machine, or `auto`.
    memory: str = "auto"
    expert_slots: int | None = None  # experts kept in memory; what the memory allows if None
    # What every token uses: as `published`, or a form that `finback convert` made (`int8`, `int4`,
    # or its folder), which is not exact.
    spine: str = "published"
    stream_spine: bool | None = None  # read what every token uses anew each step; if None as needed
    policy: str = DEFAULT_POLICY  # which expert to give up
    heat: str | None = None  # a file that keeps across runs which experts are used much
    # Tokens that are guessed and verified together, while it pays: what followed the last ones when
    # they occurred before (`lookup`), what a small model writes (its folder or name; it must have
    # the same vocabulary, and be small beside the memory), or none (`off`). They change no text.
    drafts: str = "off"
    states: str | None = None  # a folder where states of prefixes are kept; nothing is if None
    keep_every: int | None = None  # tokens between two states of an answer; 4,096 if None
    keep_every_s: float | None = None  # seconds between them, besides
    states_quota: str = "32GiB"  # of that folder, for all models; or `20%` of its disk
    guesses: bool = True  # read experts ahead that may be wanted
    read_threads: int = 4  # for each disk
    direct_reads: bool = True  # past the page cache, where that is possible
    threads: int | None = None  # computing threads; all cores this process may use if None
    # How rows are rounded before products with quantised weights: int16 has a relative error of
    # 2e-5, eighty times finer than the bfloat16 of Kimi K3's own code, int8 of 5e-3.
    activations: Activations = DEFAULT_ACTIVATIONS

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            UsageError: Naming the option and its limit.
        """
        if self.activations not in get_args(Activations):
            raise UsageError(
                f"activations must be one of {', '.join(get_args(Activations))}, "
                f"not {self.activations!r}"
            )
        if self.policy not in POLICY_NAMES:
            raise UsageError(
                f"policy must be one of {', '.join(POLICY_NAMES)}, not {self.policy!r}"
            )
        if not isinstance(self.drafts, str) or not self.drafts:
            raise UsageError(f"drafts is off, lookup or a model's folder, not {self.drafts!r}")
        if self.policy == "pinned" and self.heat is None:
            raise UsageError("the policy pinned needs the file of --heat, to know what to pin")
        for name in ("read_threads", *MAY_BE_NONE):
            value = getattr(self, name)
            if name in MAY_BE_NONE and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise UsageError(f"threads must be at most {MAX_THREADS}, not {self.threads}")
        for name in ("guesses", "direct_reads", "spill"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if not isinstance(self.spine, str) or not self.spine:
            raise UsageError(f"spine is published, int8, int4 or a folder, not {self.spine!r}")
        if self.heat is not None and (not isinstance(self.heat, str) or not self.heat):
            raise UsageError(f"heat is the path of a file, not {self.heat!r}")
        if self.states is not None and (not isinstance(self.states, str) or not self.states):
            raise UsageError(f"states is the path of a folder, not {self.states!r}")
        if not isinstance(self.states_quota, str):
            raise UsageError(f"states_quota is a text such as 32GiB, not {self.states_quota!r}")
        parse_bytes(self.states_quota, 1 << 40)
        if self.max_spill_writes is not None:
            if not isinstance(self.max_spill_writes, str):
                raise UsageError(f"max_spill_writes is a text, not {self.max_spill_writes!r}")
            parse_bytes(self.max_spill_writes, 1 << 40)
        every = self.keep_every_s
        if every is not None and (not isinstance(every, int | float) or not 0 < every < 1e9):
            raise UsageError(f"keep_every_s must be a number of seconds above 0, not {every!r}")
        if not isinstance(self.memory, str):
            raise UsageError(f"memory is a text such as 4GiB, 50% or auto, not {self.memory!r}")
        if self.memory != "auto":
            parse_bytes(self.memory, 1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are picked and when to stop."""

    max_tokens: int | None = field(default=None, metadata={"help": "Stop after this many tokens."})
    temperature: float = field(
        default=1.0, metadata={"help": "Randomness; 0 takes the likeliest token."}
    )
    top_p: float = field(
        default=1.0, metadata={"help": "Keep the likeliest tokens of this total probability."}
    )
    top_k: int = field(
        default=0, metadata={"help": "Keep this many likeliest tokens; 0 keeps all."}
    )
    min_p: float = field(
        default=0.0, metadata={"help": "Drop tokens below this share of the likeliest."}
    )
    seed: int | None = field(
        default=None,
        metadata={"help": "Equal seeds give equal text; chosen and shown if left out."},
    )
    repetition_penalty: float = field(
        default=1.0, metadata={"help": "Above 1: tokens of prompt and answer become less likely."}
    )
    frequency_penalty: float = field(
        default=0.0, metadata={"help": "Taken off a token for each time the answer has it."}
    )
    presence_penalty: float = field(
        default=0.0, metadata={"help": "Taken off every token that the answer has."}
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added, by token id
    logprobs: int | None = None  # rate the answer's tokens, and give so many of the likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, from the second on
    # What the answer must look like, one of them: a JSON schema (as text or as an object), a
    # regular expression, one of some texts, or a Lark grammar.
    json_schema: str | bool | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            RequestError: Naming the option and its limits.
        """
        if self.max_tokens is not None:
            self._check_int("max_tokens", 1, None)
        self._check_int("top_k", 0, None)
        if self.seed is not None:
            self._check_int("seed", 0, MAX_SEED)
        self._check_float("temperature", 0.0, 100.0)
        self._check_float("top_p", 0.0, 1.0)
        self._check_float("min_p", 0.0, 1.0)
        self._check_float("repetition_penalty", 0.01, 100.0)
        self._check_float("frequency_penalty", -100.0, 100.0)
        self._check_float("presence_penalty", -100.0, 100.0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name, 0, MAX_LOGPROBS)
        self._check_bias()
        self._check_constraints()
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0; use temperature 0 for the likeliest token")
        self._check_tuple("stop", str, "non-empty strings")
        self._check_tuple("stop_token_ids", int, "token ids")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos must be true or false")

    def replaced(self, **changes: object) -> Self:
        """Give a copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def _check_tuple(self, name: str, kind: type, what: str) -> None:
        value = getattr(self, name)
        value = (value,) if isinstance(value, str) and kind is str else value
        values = tuple(value) if isinstance(value, list | tuple) else None
        if values is None or not all(
            isinstance(v, kind) and not isinstance(v, bool) and v != "" for v in values
        ):
            raise RequestError(f"{name} must be a list of {what}")
        object.__setattr__(self, name, values)

    def _check_constraints(self) -> None:
        names = ("json_schema", "regex", "choice", "grammar")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(f"{' and '.join(given)} exclude each other; give one of them")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(f"{name} must be a text, not {reprlib.repr(value)}")
            _check_unicode(name, value)
        if self.choice is not None:
            self._check_tuple("choice", str, "non-empty strings")
            if not self.choice:
                raise RequestError("choice must have at least one text")
            for text in self.choice:
                _check_unicode("choice", text)
        if isinstance(self.json_schema, str):
            _check_unicode("json_schema", self.json_schema)

    def _check_bias(self) -> None:
        told = "logit_bias must map token ids to numbers from -1e6 to 1e6"
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(told)
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or isinstance(token, bool):
                raise RequestError(told)
            if not isinstance(bias, int | float) or isinstance(bias, bool) or not abs(bias) <= 1e6:
                raise RequestError(told)

    def _check_int(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if not is_int or value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"from {low} to {high}"
            raise RequestError(f"{name} must be a whole number {limits}, not {reprlib.repr(value)}")

    def _check_float(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # refuses NaN too
            shown = reprlib.repr(value)
            raise RequestError(f"{name} must be a number from {low:g} to {high:g}, not {shown}")


def _check_unicode(name: str, value: object) -> None:
    """Refuse a text that cannot be written, as arguments with bytes that are no UTF-8 become."""
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} holds a character that is none ({error.reason})") from error
