"""Where the seconds and bytes of a run went. It only adds up; it knows no model and no file."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

# What the main thread does in a step; the rest of a step is "other".
COMPUTE = ("embedding", "residual", "attention", "router", "experts", "shared", "dense", "head")


class Spans:
    """Seconds by phase and counts by name, for one engine.

    Phases are of one thread and may nest: `seconds` has the time of each without those inside it,
    `whole` with them. The reader's threads add `read`, the time with reads under way.
    """

    def __init__(self) -> None:
        """Start with nothing measured."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.whole: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0  # when the innermost open phase began, or went on

    def span(self, phase: str) -> "Span":
        """Time a block: `with spans.span(phase):`."""
        return Span(self, phase)

    def _enter(self, phase: str, now: float) -> None:
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._open.append(phase)
        self._since = now

    def _leave(self, phase: str, start: float) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._since
        self.whole[phase] += now - start
        self._open.pop()
        self._since = now

    def count(self, name: str, amount: int) -> None:
        """Add to a counter, such as bytes read."""
        self.counts[name] += amount

    def snapshot(self) -> "Snapshot":
        """Remember the totals, to be subtracted from later ones."""
        return Snapshot(dict(self.seconds), dict(self.whole), Counter(self.counts))

    def since(self, start: "Snapshot") -> "Profile":
        """Give what was spent in steps since a snapshot."""
        seconds = {k: v - start.seconds.get(k, 0.0) for k, v in self.seconds.items()}
        counts = {k: v - start.counts.get(k, 0) for k, v in self.counts.items()}
        return Profile(
            wall_s=self.whole["step"] - start.whole.get("step", 0.0),
            read_s=seconds.get("read", 0.0),
            wait_s=seconds.get("wait", 0.0),
            other_s=seconds.get("step", 0.0),
            compute={name: seconds[name] for name in COMPUTE if name in seconds},
            counts={name: count for name, count in counts.items() if count},
        )


class Span:
    """One timed block; a class of its own because a token has hundreds of them."""

    __slots__ = ("_phase", "_spans", "_start")

    def __init__(self, spans: Spans, phase: str) -> None:
        """Time nothing yet."""
        self._spans, self._phase = spans, phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._spans._enter(self._phase, self._start)

    def __exit__(self, *error: object) -> None:
        self._spans._leave(self._phase, self._start)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Totals at one moment."""

    seconds: Mapping[str, float]
    whole: Mapping[str, float]
    counts: Mapping[str, int]


@dataclass(slots=True)
class Profile:
    """What some steps cost: `wall_s` = `compute_s` + `wait_s` + `other_s`, with reads beside it."""

    wall_s: float = 0.0
    read_s: float = 0.0  # with reads under way
    wait_s: float = 0.0  # with nothing to compute until bytes came
    other_s: float = 0.0
    compute: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """Sum up the phases of computing."""
        return sum(self.compute.values())

    @property
    def bytes_read(self) -> int:
        """Count the bytes asked for and delivered, borders apart."""
        return self.counts.get("bytes_read", 0)

    @property
    def gbps(self) -> float:
        """Give the bytes read a second of all the time, in GB."""
        return self.bytes_read / self.wall_s / 1e9 if self.wall_s > 0 else 0.0

    @property
    def hit_rate(self) -> float:
        """Give the share of experts that were in memory when they were wanted."""
        there, joined, missed = (
            self.counts.get(name, 0) for name in ("expert_hits", "joined", "expert_misses")
        )
        wanted = there + joined + missed
        return there / wanted if wanted else 0.0

    @property
    def guess_recall(self) -> float:
        """Give the share of experts not in memory before that a guess had asked for."""
        used = self.counts.get("guesses_used", 0)
        needed = used + self.counts.get("expert_misses", 0)
        return used / needed if needed else 0.0

    @property
    def mean_request(self) -> float:
        """Give the mean size of a read in bytes."""
        reads = self.counts.get("reads", 0)
        return self.counts.get("bytes_requested", 0) / reads if reads else 0.0

    def as_json(self, tokens: int, ceiling_gbps: float | None) -> dict[str, object]:
        """Give the figures under the names that every report of finback uses."""
        return {
            "tokens_per_s": tokens / self.wall_s if self.wall_s > 0 else 0.0,
            "gbps": self.gbps,
            "bytes_per_token": self.bytes_read / max(1, tokens),
            "of_ceiling": self.gbps / ceiling_gbps if ceiling_gbps else None,
            "compute_s": self.compute_s,
            "wait_s": self.wait_s,
            "read_s": self.read_s,
            "other_s": self.other_s,
            "wall_s": self.wall_s,
            "hit_rate": self.hit_rate,
            "guess_recall": self.guess_recall,
            "guess_wasted_bytes": self.counts.get("guess_wasted_bytes", 0),
            "mean_request_bytes": self.mean_request,
            "compute": dict(self.compute),
            "counts": dict(self.counts),
        }
