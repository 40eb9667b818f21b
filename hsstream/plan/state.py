"""The few integers that resume an epoch, and the fingerprint that ties them to one order.

In: what decides the order. Out: a JSON-ready dict of under 300 bytes. Refused: states of another
version, data set, batching, seed or order, by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from hsstream.errors import ResumeError
from hsstream.plan.policy import Batching, Lengths, Order, as_ints

STATE_VERSION = 1
_INTS = ("epoch", "consumed", "lanes")


def _digest(*chunks: bytes) -> str:
    """16 hex digits; every chunk goes in with its length, so that chunks cannot run together."""
    digest = hashlib.blake2b(digest_size=8)
    for chunk in chunks:
        digest.update(len(chunk).to_bytes(8, "little") + chunk)
    return digest.hexdigest()


def _canonical(settings: Mapping[str, object]) -> bytes:
    return ";".join(f"{name}={_plain(settings[name])}" for name in sorted(settings)).encode()


def _plain(value: object) -> str:
    """One text for equal settings: 64, numpy's 64 and True must not depend on their type."""
    if isinstance(value, tuple):
        return ",".join(map(_plain, value)) + ","
    return str(value) if value is None or isinstance(value, str) else str(int(value))  # type: ignore[call-overload]


def fingerprint(
    lengths: Lengths, shards: Lengths, batching: Batching, order: Order, identity: bytes = b""
) -> str:
    """One short string with a hash for each of data, batching, seed and order.

    `lengths` and `shards` are those given to `plan_epoch`; `identity` is whatever else tells this
    selection from another (a digest of its keys, the weights of several roots). Ranks, threads,
    paths and `order.tail`, which do not change the sequence, do not enter.
    """
    columns = [as_ints(*pair).astype("<i8").tobytes() for pair in (("lengths", lengths), ("shards", shards))]
    rest = {name: value for name, value in asdict(order).items() if name not in ("seed", "tail")}
    parts = {
        "data": _digest(*columns, identity),
        "batching": _digest(_canonical(asdict(batching))),
        "seed": _digest(str(int(order.seed)).encode()),
        "order": _digest(_canonical(rest)),
    }
    return ",".join(f"{name}:{value}" for name, value in parts.items())


def make_state(epoch: int, consumed: int, lanes: int, fingerprint: str) -> dict[str, Any]:
    """The state after `consumed` global micro-batches of `epoch`; plain JSON types."""
    return {
        "version": STATE_VERSION,
        "epoch": int(epoch),
        "consumed": int(consumed),
        "lanes": int(lanes),
        "fingerprint": fingerprint,
    }


def check_state(
    state: object, fingerprint: str, describe: Mapping[str, str] | None = None
) -> tuple[int, int, int]:
    """(epoch, consumed, lanes) of a state made for the same order as `fingerprint`.

    `describe` says in words what this run has for any of data, batching, seed and order.

    Raises:
        ResumeError: not a state, of another version, or of another order; names what differs.
    """
    if not isinstance(state, Mapping):
        raise ResumeError(f"a state is a dict, found {type(state).__name__}")
    _check_version(state.get("version"))
    values = tuple(_counter(name, state.get(name)) for name in _INTS)
    _check_parts(str(state.get("fingerprint")), fingerprint, describe or {})
    return values[0], values[1], values[2]


def _check_version(version: object) -> None:
    if version != STATE_VERSION or isinstance(version, bool):
        raise ResumeError(f"expected a state of version {STATE_VERSION}, found version {version!r}")


def _counter(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ResumeError(f"the state's {name} must be a non-negative integer, found {value!r}")
    return int(value)


def _check_parts(found: str, expected: str, describe: Mapping[str, str]) -> None:
    theirs = dict(part.partition(":")[::2] for part in found.split(","))
    ours = dict(part.partition(":")[::2] for part in expected.split(","))
    differing = [name for name, value in ours.items() if theirs.get(name) != value]
    if not differing and theirs.keys() == ours.keys():
        return
    here = "; ".join(f"{name} here: {describe[name]}" for name in differing if name in describe)
    raise ResumeError(
        f"the state was made with different {', '.join(differing) or 'parts'}"
        f"{' (' + here + ')' if here else ''}: resume with the settings it was made with, or start anew"
    )
