"""What `import finback` offers, and nothing else."""

import finback


def test_public_names_are_there() -> None:
    for name in finback.__all__:
        assert getattr(finback, name).__name__ == name


def test_public_names_can_be_listed() -> None:
    assert set(finback.__all__) <= set(dir(finback))


def test_unknown_names_are_no_surprise() -> None:
    assert not hasattr(finback, "nonsense")
