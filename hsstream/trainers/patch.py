"""How a launcher puts a data set where a trainer has no place for one: names replaced while it runs.

In: a module (or class), a name and what shall stand there. Out: the same, put back at the end, however it
comes. Refused with SampleError: a trainer that does not have the name, because it is of another version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hsstream.errors import SampleError
from hsstream.trainers.base import advice


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """(owner, name, value) for each; all of them or none.

    Raises:
        SampleError: an owner without that name.
    """
    for owner, name, _ in changes:
        if not hasattr(owner, name):
            where = getattr(owner, "__name__", repr(owner))
            known = advice(getattr(owner, "__module__", where))
            raise SampleError(
                f"{where} has no {name}: hsstream does not know this version of the trainer: {known}"
            )
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
