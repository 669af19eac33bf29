"""What do partitioners raise? One error, which knows where in the user's text the mistake stands."""

from __future__ import annotations

Span = tuple[int, int]


class PartitionError(ValueError):
    """A model that cannot be split as asked.

    `span` is the half-open range of characters at fault in the text that was parsed, or None where no text is
    to blame. Whoever knows the whole text (`pipe.Options`) draws the caret.
    """

    def __init__(self, message: str, span: Span | None = None) -> None:
        super().__init__(message)
        self.span = span
