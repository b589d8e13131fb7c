"""Ids to pieces of text that can be shown at once: whole characters only, stop strings cut off."""

import codecs
from collections.abc import Sequence

from finback.text.tokenizer import Tokenizer


class StopStrings:
    """Ends a text before the first stop string, wherever the borders of its pieces are.

    An end that may become a stop string is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Watch for any of `stop`."""
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Take a piece and give what is now certain; nothing after a stop string."""
        if self.is_stopped:
            return ""
        text = self._held + text
        # The stop that is complete first, and of those the one that began first.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)[1]]
        cut = len(text) - self._possible_start(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """Give what is still held back."""
        rest, self._held = self._held, ""
        return rest

    def _possible_start(self, text: str) -> int:
        """Count the last characters that could begin a stop string."""
        longest = max(map(len, self._stop), default=0)
        for count in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stop):
                return count
        return 0


class TextStream:
    """Turns ids into text as they come, holding back the bytes of an unfinished character.

    Special tokens are structure and give no text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """Start empty; the text ends before any of the `stop` strings."""
        self._tokenizer, self._stops = tokenizer, StopStrings(stop)
        self._specials = frozenset(tokenizer.specials.values())
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def is_stopped(self) -> bool:
        """Tell whether a stop string was met."""
        return self._stops.is_stopped

    def push(self, token_id: int) -> str:
        """Take one id and give the text that is now certain."""
        if token_id in self._specials:
            return ""
        return self._stops.push(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """Give what is still held back; an unfinished character becomes U+FFFD."""
        return self._stops.push(self._decoder.decode(b"", final=True)) + self._stops.finish()
