"""Turn the tokens of a continuation into text while they arrive."""

from collections.abc import Callable, Collection, Sequence

from megatron.data.tokenizers.base import Tokenizer

WINDOW = 8
"""The most tokens that are held back for an incomplete character, which has at most 4 bytes."""
UNFINISHED = "\ufffd"
"""The character that tokenizers return for the bytes of an incomplete or invalid character."""


class Continuation:
    """The text that follows a prompt, decoded token by token.

    Args:
        prompt: The token ids of the prompt.
        stops: The stop sequences. The text ends before the first stop sequence in it.
        emit: A function that is called with each new piece of text.
        skipped: The ids of tokens that the text leaves out.

    Attributes:
        tokens: The number of tokens added so far.
        end: The reason why the text has ended: "document", "stop" or "length". It is "" if the text
            has not ended.
    """

    # The end of the text is held back while it is an incomplete character, or while it may be the
    # beginning of a stop sequence. `emit` gets it when it is no longer held back.

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = (),
        emit: Callable[[str], None] = lambda text: None, skipped: Collection[int] = (),
    ):  # fmt: skip
        self._tokenizer, self._stops, self._emit, self._skipped = tokenizer, stops, emit, skipped
        # A token's text may depend on the tokens before it, so they are decoded together.
        self._ids = list(prompt)  # the tokens before the new ones, then the new ones
        self._old = len(self._ids)  # the number of tokens before the new ones
        self._known = tokenizer.decode(self._ids)  # the text that was passed on
        self._held, self._pieces = "", list[str]()
        self.tokens, self.end = 0, ""

    @property
    def text(self) -> str:
        """The text that has been emitted so far."""
        return "".join(self._pieces)

    def add(self, token: int) -> None:
        """Add a token. The end-of-document token ends the text, and so does an end of turn.

        If the text has already ended, do nothing.
        """
        if self.end:
            return
        self.tokens += 1
        if token in self._tokenizer.ends:
            self.finish("document")
        if token in self._skipped and self._tokenizer.decode([token]) in self._stops:
            self.finish("stop")
        if self.end or token in self._skipped:
            return
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        unfinished = text.endswith(UNFINISHED)
        if unfinished and len(self._ids) - self._old < WINDOW:
            return
        new = text.removesuffix(UNFINISHED)[len(self._known) :]
        # Invalid bytes are passed on, except the last, which may begin a character.
        self._ids = self._ids[-WINDOW:] if unfinished else self._ids[self._old :]
        self._old = 0 if unfinished else len(self._ids)
        self._known = self._tokenizer.decode(self._ids).removesuffix(UNFINISHED)
        self._pass_on(new)

    def finish(self, end: str) -> None:
        """End the text, and emit its last part, which may not have been emitted yet.

        If the text has already ended, do nothing.

        Args:
            end: The reason why the text ends.
        """
        if self.end:
            return
        # Decoded after whole characters, unfinished bytes might make these invalid too.
        held = self._tokenizer.decode(self._ids[self._old :])
        self._pass_on(held if self._old else held[len(self._known) :])
        if not self.end:
            self.end = end
            self._output(self._held)

    def _pass_on(self, new: str) -> None:
        held = self._held + new
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.end, certain = "stop", min(found)
        else:
            starts = (
                size
                for stop in self._stops
                for size in range(1, len(stop))
                if held.endswith(stop[:size])
            )
            certain = len(held) - max(starts, default=0)
        self._held = held[certain:]
        self._output(held[:certain])

    def _output(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._emit(text)
