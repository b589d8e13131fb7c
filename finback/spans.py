"""Where the seconds and bytes of a run went. It only adds up; it knows no model and no file."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Spans:
    """Seconds by phase and counts by name, for one engine."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Time a block. Phases may nest; each counts its own whole duration."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def count(self, name: str, amount: int) -> None:
        """Add to a counter, such as bytes read."""
        self.counts[name] += amount
