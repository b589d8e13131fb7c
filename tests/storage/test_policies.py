"""Policies on sequences whose best victim is plain to see."""

import numpy as np

from finback.storage.policies import POLICIES, Distance, Frequency, Recency

KEYS = np.arange(6)


def test_recency_gives_up_the_oldest() -> None:
    policy = Recency(1, 6)
    for key in (3, 1, 5, 0, 2, 4, 1):
        policy.used(np.array([key]), 0)
    assert policy.scores(KEYS, 0, 0).argmax() == 3


def test_frequency_forgets() -> None:
    policy = Frequency(1, 6, half_life=10)
    for step in range(50):
        policy.used(KEYS[1:], step)
    assert policy.scores(KEYS, 0, 50).argmax() == 0
    policy.used(KEYS[:1], 100)
    assert policy.scores(KEYS, 0, 100).argmax() != 0


def test_distance_prefers_what_is_used_often_and_of_those_the_near_layer() -> None:
    policy = Distance(3, 2)
    for step in range(40):
        for layer in range(3):
            policy.used(np.array([2 * layer]), step)  # the even ones in every step
    scores = policy.scores(KEYS, 0, 40)
    assert set(np.argsort(-scores)[:3]) == {1, 3, 5}  # never used
    assert scores[0] > scores[4] > scores[2]  # layer 0 was just computed, layer 1 comes next


def test_all_have_a_name() -> None:
    assert sorted(POLICIES) == ["distance", "frequency", "recency"]
