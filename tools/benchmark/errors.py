"""What a benchmark refuses."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot be run as asked, or has failed; one line that says what to do.

    exit_code: 2 when the call is at fault, 1 when something that was measured is.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
