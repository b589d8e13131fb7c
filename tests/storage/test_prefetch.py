"""Guesses: the better way is followed, and none where none is good."""

from finback.storage.prefetch import Guesses


def nothing(expert: int) -> bool:
    return False


def test_the_way_that_was_right_is_followed() -> None:
    guesses = Guesses(2)
    for step in range(60):
        admitted = guesses.admit(4, {"router": [step % 7 + 10, 1]}, nothing)
        guesses.judge(4, [20, 21])
    assert admitted == (20, 21)  # what was chosen last
    for step in range(80):
        admitted = guesses.admit(4, {"router": [step, step + 1]}, nothing)
        guesses.judge(4, [step, step + 1])
    assert admitted == (79, 80)


def test_where_no_way_is_right_nothing_is_read() -> None:
    guesses = Guesses(2)
    for step in range(40):
        admitted = guesses.admit(0, {"router": [1, 2]}, nothing)
        guesses.judge(0, [step + 5])
    assert admitted == ()
    for _ in range(40):  # guesses are judged all the same
        admitted = guesses.admit(0, {"router": [1, 2]}, nothing)
        guesses.judge(0, [1, 2])
    assert admitted == (1, 2)


def test_what_is_in_memory_is_passed_over() -> None:
    assert Guesses(2).admit(0, {"router": [1, 2, 3, 4]}, lambda e: e < 3) == (3, 4)
    assert Guesses(2).admit(0, {"router": [1, 2]}, lambda e: True) == ()
