"""Text appears as early as it is certain and never wrong."""

from hypothesis import given
from hypothesis import strategies as st

from finback.text.stream import StopStrings, TextStream
from finback.text.tokenizer import load_tokenizer
from tests.conftest import DATA

tokenizer = load_tokenizer(DATA / "tiny-k3")


def test_half_a_character_is_held_back() -> None:
    stream = TextStream(tokenizer)
    ids = list("ü€🐋".encode())  # single bytes are ids 0 to 255
    assert [stream.push(i) for i in ids] == ["", "ü", "", "", "€", "", "", "", "🐋"]
    assert stream.finish() == ""


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    stream = TextStream(tokenizer)
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\ufffd"


def test_a_stop_string_over_token_borders() -> None:
    stream = TextStream(tokenizer, ["END"])
    assert [stream.push(i) for i in b"an EN END x"] == [
        "a", "n", " ", "", "", "EN ", "", "", "", "", "",
    ]  # fmt: skip
    assert stream.is_stopped
    assert stream.finish() == ""


def test_special_tokens_give_no_text() -> None:
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.specials["<|end_of_msg|>"]) == ""


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), max_size=40),
)
def test_cut_anywhere_the_text_is_that_before_the_first_stop(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    stops, out, at = StopStrings(stop), "", 0
    for size in [*sizes, len(text)]:
        out += stops.push(text[at : at + size])
        at += size
    out += stops.finish()
    # The stop that is complete first ends the text; of those, the one that began first.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert out == (text[: min(ends)[1]] if ends else text)
    assert stops.is_stopped == bool(ends)
