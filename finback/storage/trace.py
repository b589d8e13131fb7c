"""Recorded routes, and what a cache would have made of them: every policy beside the best possible.

A trace is a list of leases in the order of a run: the layer, and the experts that were wanted. It
is kept as one compressed array file (`.npz`), without pickled objects.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from finback.errors import DamagedFile
from finback.storage.arrays import read_arrays
from finback.storage.policies import POLICIES, Distance, Policy

FORMAT = 1
MAX_WANTS, MAX_KEYS = 1 << 28, 1 << 26
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """Leases one after the other; `experts` of lease i are those from `starts[i]` on."""

    num_layers: int
    num_experts: int
    expert_bytes: int
    layers: npt.NDArray[np.int64]  # (N,)
    starts: npt.NDArray[np.int64]  # (N + 1,)
    experts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def num_steps(self) -> int:
        """Count the passes over the layers."""
        return int(np.count_nonzero(np.diff(self.layers) <= 0)) + 1 if len(self.layers) else 0

    def save(self, path: Path) -> None:
        """Write the trace, whole or not at all."""
        part = path.with_name(path.name + ".part")
        head = np.array([FORMAT, self.num_layers, self.num_experts, self.expert_bytes])
        with part.open("wb") as file:
            np.savez_compressed(
                file, head=head, layers=self.layers, starts=self.starts, experts=self.experts
            )
        part.replace(path)


def load_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        DamagedFile: It is missing, cut, of another format, or contradicts itself.
    """
    arrays = read_arrays(path, ("head", "layers", "starts", "experts"))
    if any(array.dtype.kind not in "iu" for array in arrays.values()):
        raise DamagedFile(f"{path}: the trace contradicts itself")
    head, layers, starts, experts = (array.astype(np.int64) for array in arrays.values())
    if head.shape != (4,) or head[0] != FORMAT or head[1:].min() < 1:
        raise DamagedFile(f"{path}: is a trace of another version")
    num_layers, num_experts, expert_bytes = (int(n) for n in head[1:])
    if num_layers * num_experts > MAX_KEYS or not _is_sound(
        num_layers, num_experts, layers, starts, experts
    ):
        raise DamagedFile(f"{path}: the trace contradicts itself")
    return Trace(num_layers, num_experts, expert_bytes, layers, starts, experts)


def _is_sound(num_layers: int, num_experts: int, layers: Ints, starts: Ints, experts: Ints) -> bool:
    """Tell whether every lease names a layer and experts there are, none of them twice."""
    if not (layers.ndim == starts.ndim == experts.ndim == 1 and len(starts) == len(layers) + 1):
        return False
    if starts[0] != 0 or starts[-1] != len(experts) or len(experts) > MAX_WANTS:
        return False
    if starts.min() < 0 or starts.max() > len(experts) or (np.diff(starts) <= 0).any():
        return False
    if len(experts) == 0:
        return True
    if layers.min() < 0 or layers.max() >= num_layers:
        return False
    if experts.min() < 0 or experts.max() >= num_experts:
        return False
    leases = np.repeat(np.arange(len(layers)), np.diff(starts))
    return len(np.unique(leases * num_experts + experts)) == len(experts)


class Recorder:
    """Notes leases as they happen; give `note` to `ExpertCache.on_lease`."""

    def __init__(self, num_layers: int, num_experts: int, expert_bytes: int) -> None:
        """Start with nothing."""
        self._shape = (num_layers, num_experts, max(1, expert_bytes))
        self._layers: list[int] = []
        self._experts: list[Sequence[int]] = []

    def note(self, layer: int, experts: Sequence[int]) -> None:
        """Take one lease in."""
        self._layers.append(layer)
        self._experts.append(tuple(experts))

    def trace(self) -> Trace:
        """Give what was noted so far."""
        return make_trace(*self._shape, self._layers, self._experts)


def make_trace(
    num_layers: int,
    num_experts: int,
    expert_bytes: int,
    layers: Sequence[int],
    experts: Iterable[Sequence[int]],
) -> Trace:
    """Make a trace of leases."""
    wanted = [np.asarray(some, np.int64) for some in experts]
    starts = np.cumsum([0, *(len(some) for some in wanted)])
    flat = np.concatenate(wanted) if wanted else np.empty(0, np.int64)
    return Trace(num_layers, num_experts, expert_bytes, np.array(layers, np.int64), starts, flat)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a cache of some slots would have hit, as shares of all wants."""

    slots: int
    hits: dict[str, float]  # by policy, and "belady": the best that any could


def replay(
    trace: Trace, slots: int, policies: Sequence[str] | None = None, heat: Path | None = None
) -> Replay:
    """Run a trace through caches of `slots` experts; the first use of an expert is no hit.

    Args:
        policies: All if None, that with pinned experts only where there is heat.
        heat: What an earlier run has learnt.

    Raises:
        DamagedFile: `heat` is no heat file of such a model.
    """
    if policies is None:
        policies = [name for name in POLICIES if name != "pinned" or heat is not None]
    if len(trace.experts) == 0:
        return Replay(slots, dict.fromkeys([*policies, "belady"], 0.0))
    wants = len(trace.experts)
    hits = {}
    for name in policies:
        policy = POLICIES[name](trace.num_layers, trace.num_experts, slots)
        if heat is not None and isinstance(policy, Distance):
            policy.restore(heat)
        hits[name] = _replay_policy(trace, slots, policy) / wants
    return Replay(slots, hits | {"belady": _replay_belady(trace, slots) / wants})


def _replay_policy(trace: Trace, slots: int, policy: Policy) -> int:
    """Count hits. Experts of a lease are not given up for each other, as in the cache."""
    keys = np.full(slots, -1, np.int64)
    where = np.full(trace.num_layers * trace.num_experts, -1, np.int64)
    hits, filled, step, last = 0, 0, 0, -1
    for at, layer in enumerate(trace.layers.tolist()):
        step += layer <= last
        last = layer
        wanted = trace.experts[trace.starts[at] : trace.starts[at + 1]] + layer * trace.num_experts
        policy.used(wanted, step)
        there = where[wanted] >= 0
        hits += int(there.sum())
        missing = wanted[~there]
        room = min(len(missing), slots - filled)
        new = np.arange(filled, filled + room)
        filled += room
        if len(missing) > room:
            pinned = np.zeros(slots, bool)
            pinned[where[wanted[there]]] = True
            pinned[new] = True
            candidates = np.flatnonzero(~pinned)
            scores = policy.scores(keys[candidates], layer, step)
            count = min(len(missing) - room, len(candidates))
            victims = candidates[np.argsort(-scores, kind="stable")[:count]]
            where[keys[victims]] = -1
            new = np.concatenate([new, victims])
        kept = missing[: len(new)]
        keys[new] = kept
        where[kept] = new
    return hits


def _replay_belady(trace: Trace, slots: int) -> int:
    """Count the hits of giving up what is wanted last, which nobody can know in advance.

    Source: Belady 1966, "A study of replacement algorithms for a virtual-storage computer".
    """
    keys = trace.experts + np.repeat(trace.layers, np.diff(trace.starts)) * trace.num_experts
    leases = np.repeat(np.arange(len(trace)), np.diff(trace.starts))
    following = np.full(len(keys), np.iinfo(np.int64).max)
    seen: dict[int, int] = {}
    for at in range(len(keys) - 1, -1, -1):
        key = int(keys[at])
        following[at] = seen.get(key, np.iinfo(np.int64).max)
        seen[key] = int(leases[at])
    hits = 0
    cached: dict[int, int] = {}  # expert to its next use
    heap: list[tuple[int, int]] = []  # latest next use first; may hold outdated entries
    for at in range(len(trace)):
        span = range(int(trace.starts[at]), int(trace.starts[at + 1]))
        for n in span:
            key, then = int(keys[n]), int(following[n])
            if key in cached:
                hits += 1
            cached[key] = then
            heapq.heappush(heap, (-then, key))
        while len(cached) > slots:
            then, key = heapq.heappop(heap)
            if cached.get(key) == -then:
                del cached[key]
    return hits
