"""The tree of exceptions, their place, and that they survive a DataLoader worker."""

from __future__ import annotations

import inspect
import pickle

import pytest

from hsstream import errors
from hsstream.errors import REASONS, FormatError, HsStreamError, located

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, HsStreamError) and kind.__module__ == errors.__name__
]
BASES = {
    "SampleError": ValueError,
    "NonFiniteError": errors.SampleError,
    "FormatError": ValueError,
    "UnsupportedVersionError": FormatError,
    "CorruptDataError": FormatError,
    "TruncatedShardError": FormatError,
    "StorageError": OSError,
    "StorageFullError": errors.StorageError,
    "ResumeError": ValueError,
    "SchemaMismatchError": ValueError,
    "ForkError": RuntimeError,
}


def test_the_docstring_shows_the_whole_tree() -> None:
    shown = {word for word in errors.__doc__.replace("(", " ").split() if word.endswith("Error")}  # type: ignore[union-attr]
    assert {kind.__name__ for kind in CLASSES} == shown - {"ValueError", "OSError", "RuntimeError"}


@pytest.mark.parametrize(("name", "base"), BASES.items())
def test_the_tree(name: str, base: type[Exception]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, HsStreamError)
    assert issubclass(kind, base)


@pytest.mark.parametrize("kind", CLASSES)
def test_one_line_of_text_survives_pickling_with_its_place(kind: type[HsStreamError]) -> None:
    error = kind("expected 1, found 2")
    error.shard, error.tensor = "hs-000000.tar", "last_hidden_state"
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == str(error) == "expected 1, found 2 [shard hs-000000.tar, tensor last_hidden_state]"
    assert str(kind("fine")) == "fine"


def test_a_reason_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(FormatError("x", "bad_tar"))).reason == "bad_tar"
    assert errors.TruncatedShardError("x").reason == "truncated"
    assert errors.UnsupportedVersionError("x").reason == "unsupported_version"
    assert errors.CorruptDataError("x").reason == "hash_mismatch"


def test_reasons_are_closed() -> None:
    assert all(FormatError("x", reason).reason == reason for reason in REASONS)
    with pytest.raises(ValueError, match="no_such_reason") as caught:
        FormatError("x", "no_such_reason")
    assert not isinstance(caught.value, HsStreamError)


def test_located_adds_the_place_and_the_innermost_wins() -> None:
    with (
        pytest.raises(FormatError) as caught,
        located(shard="outer.tar", key="k"),
        located(shard="inner.tar"),
        located(tensor="t"),
    ):
        raise FormatError("broken")
    assert str(caught.value) == "broken [shard inner.tar, key k, tensor t]"


def test_located_leaves_other_exceptions_alone() -> None:
    with pytest.raises(KeyError) as caught, located(key="k"):
        raise KeyError("x")
    assert not hasattr(caught.value, "key")
