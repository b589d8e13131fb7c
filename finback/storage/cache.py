"""Experts in memory: slots of an arena, filled when needed, given up by a policy.

A *lease* brings experts of one layer into memory and hands them over as they come: at once those
that are there, then each as its bytes arrive. There may be fewer slots than experts of a lease:
what has been computed makes room for the next.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from finback.checkpoint.formats import BAD_SCALE, Weight, has_bad_scale
from finback.errors import DamagedFile, FinbackError
from finback.spans import Spans
from finback.storage.arena import Arena, release
from finback.storage.extents import ExpertLayout, find, place
from finback.storage.memory import pressure
from finback.storage.policies import Distance, Policy
from finback.storage.prefetch import Guesses
from finback.storage.reader import Priority, Reader, Ticket
from finback.units import human_bytes

SECONDS_BETWEEN_LOOKS = 1.0
READ_AHEAD = 384 << 20  # keeps a disk busy while a layer's other half is computed (docs/log.md)
MUCH_PRESSURE = 0.1  # of ten seconds with something waiting for memory
logger = logging.getLogger(__name__)


Matrices = Mapping[str, Weight]
Key = tuple[int, int]  # layer, expert


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    key: Key | None = None
    ticket: Ticket | None = None  # while its bytes come
    matrices: Matrices = field(default_factory=dict)
    pins: int = 0  # leases that use it or wait for it
    is_guess: bool = False  # read on a guess that nobody has used yet


class ExpertCache:
    """Keeps experts in a fixed number of slots. For use by one thread."""

    def __init__(
        self,
        layout: Callable[[int, int], ExpertLayout],
        reader: Reader,
        spans: Spans,
        arena: Arena,
        policy: Policy | None,
        num_experts: int,
        guesses: Guesses | None = None,
    ) -> None:
        """Start empty.

        Args:
            layout: Gives the layout of an expert from its layer and number.
            reader: Reads what is missing; stays the caller's.
            spans: Counts hits and misses; `wait` is the time in which nothing could be computed.
            arena: Has the slots.
            policy: Says what to give up; None where there is a slot for every expert.
            num_experts: Of a layer, to number experts for the policy.
            guesses: Judges what may be read ahead; None for no guesses at all.
        """
        self._layout, self._reader, self._spans = layout, reader, spans
        self._arena, self._policy, self._num_experts = arena, policy, num_experts
        self._guesses = guesses
        self._slots = [_Slot(number) for number in range(arena.count)]
        self._free = list(reversed(self._slots))  # the low ones first, so that few are touched
        self._where: dict[Key, _Slot] = {}
        self._keys = np.full(arena.count, -1, np.int64)  # of each slot, for the policy
        self._busy = np.zeros(arena.count, bool)  # pinned or being filled
        self._is_torn = False  # a lease is open, or was interrupted at an unknown place
        self._last_look = 0.0
        self._held: dict[int, _Slot] = {}  # of the lease that is open
        self._guessed: list[_Slot] = []  # slots that may still be filled on a guess
        self.step, self._last_layer = 0, -1
        self.on_lease: Callable[[int, Sequence[int]], None] | None = None  # a trace

    def save_heat(self, path: Path) -> None:
        """Keep across runs which experts are used much, where the policy has learnt it."""
        if isinstance(self._policy, Distance):
            self._policy.save(path)

    @property
    def slot_bytes(self) -> int:
        """Give the bytes of a slot."""
        return self._arena.slot_bytes

    @property
    def num_slots(self) -> int:
        """Count the slots there are now."""
        return len(self._slots)

    @contextmanager
    def lease(
        self, layer: int, experts: Sequence[int], in_order: bool = False
    ) -> Iterator[Iterator[Mapping[int, Matrices]]]:
        """Bring experts of one layer into memory.

        Args:
            layer: Counted from 0 over all layers, routed or not.
            experts: Numbers without repeats, in any order.
            in_order: Hand them over in ascending order, whatever comes first.

        Yields:
            Batches of experts by number, each expert once: matrices by name, read-only, valid
            until the next batch is asked for.

        Raises:
            ReadError: A file ended early or the device failed; from the iterator.
            DamagedFile: The bytes cannot be weights; from the iterator.
        """
        self._mend()
        self._is_torn = True  # until this lease has ended in order
        if layer <= self._last_layer:
            self.step += 1  # another pass over the layers
            self._yield_to_pressure()
        self._last_layer = layer
        if self.on_lease is not None:
            self.on_lease(layer, experts)
        if self._guesses is not None:
            self._guesses.judge(layer, experts)
            self._drop_guesses(layer, experts)
        if self._policy is not None:
            self._policy.used(np.array(experts, np.int64) + layer * self._num_experts, self.step)
        held = self._held
        try:
            if in_order:
                ahead = {expert for expert in experts if self._is_guess(layer, expert)}
                todo = self._hold(layer, sorted(experts), held)
                yield self._in_order(layer, sorted(experts), todo, held, ahead)
            else:
                todo = self._begin_all(layer, self._hold(layer, experts, held), held)
                yield self._batches(layer, todo, held)
        except Exception:  # but not Ctrl-C, which may come at any line: see `_mend`
            self._let_go()
            self._is_torn = False
            raise
        self._let_go()
        self._is_torn = False

    @property
    def read_ahead(self) -> int:
        """Give how many slots a layer that is read whole is read through."""
        enough = -(-READ_AHEAD // self._arena.slot_bytes)
        return max(4, min(len(self._slots) // 3, enough))

    @property
    def may_guess(self) -> bool:
        """Tell whether anything is read on a guess."""
        return self._guesses is not None

    def guess(self, layer: int, ways: Mapping[str, Sequence[int]], most: int | None = None) -> None:
        """Begin to read experts that may be wanted soon, into slots that nothing needs now.

        Args:
            layer: Which has not been leased in this pass.
            ways: As for `Guesses.admit`; what is in memory already is passed over.
            most: Experts at most; few if None.
        """
        if self._guesses is None:
            return

        def is_there(expert: int) -> bool:
            return (layer, expert) in self._where

        for expert in self._guesses.admit(layer, ways, is_there, most):
            slot = self._take_slot(self._last_layer)  # as seen from here: that layer is near
            if slot is None:
                return
            self._begin(slot, (layer, expert), Priority.GUESS)
            slot.is_guess = True
            self._guessed.append(slot)
            self._spans.count("guesses", 1)

    def _drop_guesses(self, layer: int, wanted: Sequence[int]) -> None:
        """Give up the guesses for a layer that turned out wrong and are not read yet."""
        waiting = []
        for slot in self._guessed:
            if not slot.is_guess or slot.ticket is None or slot.key is None:
                continue
            if slot.key[0] == layer and slot.key[1] not in wanted and not slot.ticket.is_done:
                self._reader.cancel(slot.ticket)
                self._vacate(slot)
            else:
                waiting.append(slot)
        self._guessed = waiting

    def give_back(self, count: int) -> int:
        """Give slots back to the machine, the least wanted first; tell how many went."""
        given = 0
        while given < count and len(self._slots) > 1:
            slot = self._take_slot(0)
            if slot is None:
                break
            release(self._arena.slot(slot.number))
            self._slots.remove(slot)
            self._busy[slot.number] = True  # never a candidate again
            given += 1
        return given

    def _yield_to_pressure(self) -> None:
        """Where the machine is short of memory, give some slots back, at most once a second."""
        now = time.monotonic()
        if now - self._last_look < SECONDS_BETWEEN_LOOKS or len(self._slots) == 1:
            return
        self._last_look = now
        share = pressure()
        if share < MUCH_PRESSURE:
            return
        given = self.give_back(max(1, len(self._slots) // 16))
        self._spans.count("slots_given_back", given)
        logger.warning(
            "memory is short on this machine (%.0f %% of the time something waited for it): gave "
            "%s back, %d experts still fit",
            share * 100,
            human_bytes(given * self._arena.slot_bytes),
            len(self._slots),
        )

    def _mend(self) -> None:
        """After a lease that was torn apart by Ctrl-C, forget everything and begin empty."""
        if not self._is_torn:
            return
        self._reader.drain()  # nothing is written into a slot any more
        self._held.clear()
        self._where.clear()
        self._guessed = []
        for slot in self._slots:
            slot.key, slot.ticket, slot.matrices = None, None, {}
            slot.pins, slot.is_guess = 0, False
            self._keys[slot.number], self._busy[slot.number] = -1, False
        self._free = list(reversed(self._slots))
        self._is_torn = False

    def check(self) -> None:
        """Test the invariants: nothing is leased, every slot is free or has one expert."""
        self._mend()
        assert all(slot.pins == 0 for slot in self._slots)
        there = [slot for slot in self._slots if slot.key is not None]
        coming = [slot for slot in self._slots if slot.key is None and slot.ticket is not None]
        assert len(there) + len(coming) + len(self._free) == len(self._slots)
        assert {slot.key for slot in there} == set(self._where)
        for slot in there:
            assert slot.key is not None
            assert self._where[slot.key] is slot
            assert slot.ticket is not None or not self._busy[slot.number]

    def _hold(self, layer: int, experts: Sequence[int], held: dict[int, _Slot]) -> list[int]:
        """Pin those that are there or on their way; give the others."""
        todo: list[int] = []
        for expert in experts:
            slot = self._where.get((layer, expert))
            if slot is None:
                todo.append(expert)
                continue
            self._pin(expert, slot, held)
            if slot.is_guess:
                slot.is_guess = False
                self._spans.count("guesses_used", 1)
            if slot.ticket is not None:
                self._reader.promote(slot.ticket)
                self._spans.count("joined", 1)
            else:
                self._spans.count("expert_hits", 1)
        self._spans.count("expert_misses", len(todo))
        return todo

    def _batches(
        self, layer: int, todo: list[int], held: dict[int, _Slot]
    ) -> Iterator[Mapping[int, Matrices]]:
        while held or todo:
            if not held:  # what is read on a guess has every slot
                self._wait_for_a_guess()
                todo = self._begin_all(layer, todo, held)
                continue
            ready = {e: slot for e, slot in held.items() if slot.ticket is None}
            if not ready:
                ready = self._arrived(layer, held)
            yield {expert: slot.matrices for expert, slot in ready.items()}
            for expert in ready:
                self._unpin(held.pop(expert))
            todo = self._begin_all(layer, todo, held)

    def _in_order(
        self,
        layer: int,
        order: list[int],
        todo: list[int],
        held: dict[int, _Slot],
        begun: set[int],  # in this pass, on a guess until now
    ) -> Iterator[Mapping[int, Matrices]]:
        """Hand experts over in their order; reads run ahead of it by `read_ahead` slots.

        What has been handed over makes room for the next, so that other layers keep theirs. Few
        are handed over together, so that others are read while those are computed.
        """
        at, together = 0, max(1, self.read_ahead // 4)
        while at < len(order):
            room = max(0, self.read_ahead - len(begun & held.keys()))
            begun.update(todo[:room])
            todo = self._begin_all(layer, todo[:room], held) + todo[room:]
            if order[at] not in held:
                todo = self._make_way(layer, order[at], todo, held)
                continue
            ready: dict[int, _Slot] = {}
            for expert in order[at : at + together]:
                slot = held.get(expert)
                if slot is not None and slot.ticket is not None and slot.ticket.is_done:
                    self._settle(slot)
                if slot is None or slot.ticket is not None:
                    break
                ready[expert] = slot
            if not ready:
                ticket = held[order[at]].ticket
                assert ticket is not None
                with self._spans.span("wait"):
                    self._reader.wait_any([ticket])
                continue
            yield {expert: slot.matrices for expert, slot in ready.items()}
            for expert in ready:
                self._unpin(held.pop(expert))
            at += len(ready)

    def _is_guess(self, layer: int, expert: int) -> bool:
        slot = self._where.get((layer, expert))
        return slot is not None and slot.is_guess

    def _make_way(
        self, layer: int, expert: int, todo: list[int], held: dict[int, _Slot]
    ) -> list[int]:
        """Begin to read the expert whose turn it is although every slot is taken by later ones."""
        if held:
            last = max(held)
            self._unpin(held.pop(last))
            todo = sorted([*todo, last])
            self._settle_guesses()
        if self._begin_all(layer, [expert], held):
            if not held:
                self._wait_for_a_guess()
            return todo
        return [other for other in todo if other != expert]

    def _arrived(self, layer: int, held: dict[int, _Slot]) -> dict[int, _Slot]:
        """Wait for the next of the experts on their way; give all that have come."""
        tickets = [slot.ticket for slot in held.values() if slot.ticket is not None]
        with self._spans.span("wait"):
            self._reader.wait_any(tickets)
        came = {
            e: slot for e, slot in held.items() if slot.ticket is not None and slot.ticket.is_done
        }
        for slot in came.values():
            self._settle(slot)
        return came

    def _begin_all(self, layer: int, todo: list[int], held: dict[int, _Slot]) -> list[int]:
        """Begin to read as many as there are slots for; give the rest."""
        for done, expert in enumerate(todo):
            slot = self._where.get((layer, expert))  # one that had made way may still be there
            if slot is None:
                slot = self._take_slot(layer)
                if slot is None:
                    return todo[done:]
                self._begin(slot, (layer, expert), Priority.DEMAND)
            self._pin(expert, slot, held)
        return []

    def _begin(self, slot: _Slot, key: Key, priority: Priority) -> None:
        layout = self._layout(*key)
        memory = self._arena.slot(slot.number)
        starts, _ = place(layout.extents)
        slot.matrices = {
            name: Weight(
                part.format,
                part.shape,
                tuple(find(memory, layout.extents, starts, a, b) for a, b in part.ranges),
            )
            for name, part in layout.matrices.items()
        }
        try:
            slot.ticket = self._reader.submit(layout.extents, memory, priority, "expert")
        except FinbackError:
            self._set_free(slot)
            raise
        slot.key, self._where[key] = key, slot
        self._keys[slot.number] = key[0] * self._num_experts + key[1]
        self._busy[slot.number] = True

    def _settle(self, slot: _Slot) -> None:
        """Take in what a finished read has brought, or forget it with its error."""
        assert slot.ticket is not None
        assert slot.key is not None
        ticket, slot.ticket = slot.ticket, None
        self._busy[slot.number] = slot.pins > 0
        try:
            if ticket.error is not None:
                raise ticket.error
            for name, matrix in slot.matrices.items():
                if has_bad_scale(matrix):
                    layer, expert = slot.key
                    raise DamagedFile(
                        f"{self._layout(*slot.key).extents[0].path}: expert {expert} of layer "
                        f"{layer}, {name}.weight_scale {BAD_SCALE}; download the file again"
                    )
        except FinbackError:
            self._forget(slot)
            raise

    def _forget(self, slot: _Slot) -> None:
        self._vacate(slot)
        if slot.pins == 0:
            self._set_free(slot)

    def _vacate(self, slot: _Slot) -> None:
        """Take the expert out of a slot; bytes may still come into it."""
        assert slot.key is not None
        del self._where[slot.key]
        slot.key, slot.matrices = None, {}
        self._keys[slot.number] = -1
        if slot.is_guess:
            slot.is_guess = False
            self._spans.count("guesses_wasted", 1)
            self._spans.count("guess_wasted_bytes", self._arena.slot_bytes)

    def _set_free(self, slot: _Slot) -> None:
        self._busy[slot.number] = False
        self._free.append(slot)

    def _take_slot(self, layer: int) -> _Slot | None:
        """Give an empty slot, emptying the least wanted one; None where all are in use."""
        if self._free:
            return self._free.pop()
        self._settle_guesses()
        candidates = np.flatnonzero(~self._busy & (self._keys >= 0))
        if len(candidates) == 0:
            return self._free.pop() if self._free else None
        chosen = 0  # any, where slots were given back and nobody kept count
        if self._policy is not None:
            scores = self._policy.scores(self._keys[candidates], layer, self.step)
            chosen = int(scores.argmax())
        slot = self._by_number(int(candidates[chosen]))
        assert slot is not None
        self._forget(slot)
        self._spans.count("evictions", 1)
        return self._free.pop()

    def _by_number(self, number: int) -> _Slot | None:
        if len(self._slots) == self._arena.count:
            return self._slots[number]
        return next((slot for slot in self._slots if slot.number == number), None)

    def _settle_guesses(self) -> None:
        """Take in what has come without being waited for; what failed is only forgotten."""
        for number in np.flatnonzero(self._busy):
            slot = self._by_number(int(number))
            if slot is None or slot.pins or slot.ticket is None or not slot.ticket.is_done:
                continue
            if slot.key is None:  # a guess that was given up
                slot.ticket = None
                self._set_free(slot)
                continue
            with suppress(FinbackError):
                self._settle(slot)

    def _wait_for_a_guess(self) -> None:
        tickets = [slot.ticket for slot in self._slots if slot.ticket is not None]
        if not tickets:
            raise FinbackError("no slot for an expert is free; load the model again")
        with self._spans.span("wait"):
            self._reader.wait_any(tickets)

    def _pin(self, expert: int, slot: _Slot, held: dict[int, _Slot]) -> None:
        slot.pins += 1
        self._busy[slot.number] = True
        held[expert] = slot

    def _let_go(self) -> None:
        """Unpin all that the open lease holds."""
        while self._held:
            self._unpin(self._held.popitem()[1])

    def _unpin(self, slot: _Slot) -> None:
        """Let go of a slot; one whose bytes still come is free when they have come."""
        slot.pins -= 1
        if slot.pins:
            return
        if slot.ticket is not None:
            self._reader.cancel(slot.ticket)
            if slot.key is not None:
                self._vacate(slot)
        elif slot.key is None:
            self._set_free(slot)
        else:
            self._busy[slot.number] = False
