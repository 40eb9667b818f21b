"""Archives for tests: made by hand, or valid ones mutated, read by us and by torch.load.

`python archives.py SEED COUNT` prints how many of COUNT mutated archives we refuse, both read the same, and
only we read (`laxer`); that both read and `differ` must not happen. torch.load is asked where we do not
refuse, in a child process: it may die.
"""

from __future__ import annotations

import io
import multiprocessing
import random
import struct
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from hsstream.errors import SourceError
from hsstream.sources.archive import Archive
from hsstream.sources.content import in_memory

DIRECTORY, LOCAL, BEHIND, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x07\x08", b"PK\x05\x06"
#: What stands where a number might.
NUMBERS = (0, 1, 7, 8, 9, 63, 64, 255, 256, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)


def forge(members: Mapping[str, bytes]) -> bytes:
    """A plain zip archive."""
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w") as made:
        for name, data in members.items():
            made.writestr(f"archive/{name}", data)
    return result.getvalue()


def same(ours: Any, theirs: Any) -> bool:
    """Whether two contents are equal, dtypes, strides and bits included."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor) or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
        if ours.stride() != theirs.stride():
            return False
        return torch.equal(_bits(ours), _bits(theirs))
    if isinstance(theirs, dict):
        return (
            isinstance(ours, dict)
            and list(ours) == list(theirs)
            and all(same(ours[name], value) for name, value in theirs.items())
        )
    if isinstance(theirs, (list, tuple)):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, float) and theirs != theirs:
        return isinstance(ours, float) and ours != ours
    return type(ours) is type(theirs) and bool(ours == theirs)


def _bits(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any strides, in order."""
    flat = torch.empty(value.numel(), dtype=value.dtype)
    return flat.copy_(value.detach().reshape(-1)).view(torch.uint8)


def outcome(data: bytes) -> Any:
    """What we read: the content, or the SourceError."""
    try:
        archive = Archive(in_memory(bytearray(data)))
        return archive.value(archive.saved)
    except SourceError as error:
        return error


def _theirs(data: bytes) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        return error


def seeds() -> list[bytes]:
    """Valid files of every kind that programs write, one with deflated members, one of old torch."""
    one = {
        "input_ids": torch.arange(1, 9),
        "loss_mask": torch.ones(8, dtype=torch.int64),
        "hidden_state": torch.arange(32.0).bfloat16().view(1, 8, 4),
        "aux_hidden_state": torch.arange(96.0).bfloat16().view(1, 8, 12),
    }
    base = torch.arange(40.0)
    values: list[Any] = [
        one,
        {
            "input_ids": torch.arange(5),
            "hidden_states": [base[:5], base[5:10].half()],
            "id": "c",
            "n": 1 << 40,
        },
        {
            "a": base[3:9].view(2, 3),
            "b": base.view(8, 5).T,
            "e": torch.empty(0),
            "s": torch.ones(1).expand(6),
        },
        torch.nn.Linear(3, 2).state_dict(),
    ]
    made = []
    for value in values:
        file = io.BytesIO()
        torch.save(value, file)
        made.append(file.getvalue())
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(made[0])) as old, zipfile.ZipFile(packed, "w") as new:
        for name in old.namelist():
            deflate = name.endswith(("data/2", "data.pkl"))
            method = zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
            new.writestr(name, old.read(name), method)
    return [*made, packed.getvalue()]


def _places(data: bytes, magic: bytes) -> list[int]:
    found, at = [], data.find(magic)
    while at >= 0:
        found.append(at)
        at = data.find(magic, at + 1)
    return found


def _in_headers(magic: bytes, size: int) -> Callable[[bytearray, random.Random], None]:
    """Change one field of one header of a kind."""

    def change(data: bytearray, chance: random.Random) -> None:
        places = _places(bytes(data), magic)
        if not places:
            return
        at = chance.choice(places) + chance.randrange(4, size)
        width = chance.choice((1, 2, 4, 8))
        value = chance.choice((*NUMBERS, len(data), len(data) - 22, chance.getrandbits(16)))
        data[at : at + width] = struct.pack("<Q", value)[:width]

    return change


def _method(data: bytearray, chance: random.Random) -> None:
    """Say of one member, in one header or in both, that it is deflated."""
    names = _places(bytes(data), DIRECTORY)
    entry = chance.choice(names)
    (local,) = struct.unpack_from("<L", data, entry + 42)
    for at in chance.choice(((entry + 10,), (local + 8,), (entry + 10, local + 8))):
        if at < len(data):
            data[at] ^= 8


def _sizes(data: bytearray, chance: random.Random) -> None:
    """Another size of one member, in both fields of the directory."""
    entry = chance.choice(_places(bytes(data), DIRECTORY))
    size = max(
        0, struct.unpack_from("<L", data, entry + 24)[0] + chance.choice((-64, -8, -1, 1, 8, 64, 4096))
    )
    data[entry + 20 : entry + 28] = struct.pack("<2L", size & 0xFFFFFFFF, size & 0xFFFFFFFF)


def _offsets(data: bytearray, chance: random.Random) -> None:
    """Two members change places, or become one."""
    one, other = (chance.choice(_places(bytes(data), DIRECTORY)) for _ in range(2))
    mine, theirs = bytes(data[one + 42 : one + 46]), bytes(data[other + 42 : other + 46])
    data[one + 42 : one + 46] = theirs
    if chance.random() < 0.5:
        data[other + 42 : other + 46] = mine


def _in_pickle(data: bytearray, chance: random.Random) -> None:
    """Change, drop or repeat bytes of the pickle (kept at its length, so the archive stays whole)."""
    start = data.find(b"\x80\x02")
    stop = data.find(BEHIND, start)
    if start < 0 or stop < 0:
        return
    at = chance.randrange(start + 2, stop)
    kind = chance.randrange(3)
    if kind == 0:
        data[at] = chance.choice(
            (*b"}]()tqrhjXKMJGNcQRbuse.a\x85\x86\x87\x88\x89\x8a", chance.randrange(256))
        )
    elif kind == 1:
        small = [n for n in range(start, stop - 1) if data[n : n + 1] in (b"K", b"M")]
        if small:
            data[chance.choice(small) + 1] = chance.choice((0, 1, 2, 3, 8, 9, 12, 16, 255))
    else:
        width = chance.randrange(1, 9)
        other = chance.randrange(start + 2, max(start + 3, stop - width))
        data[at : at + width] = data[other : other + width]


def _bytes(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 5)):
        data[chance.randrange(len(data))] = chance.randrange(256)


def _cut(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    if chance.random() < 0.5:
        del data[at:]
    else:
        del data[at : at + chance.choice((1, 4, 64, 512))]


def _grown(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at:at] = chance.randbytes(chance.choice((1, 4, 64)))


MUTATIONS = (
    *(_in_headers(DIRECTORY, 70), _in_headers(LOCAL, 50), _in_headers(BEHIND, 24), _in_headers(END, 22)),
    *(_in_headers(b"PK\x06\x06", 56), _method, _sizes, _offsets, _in_pickle, _in_pickle, _in_pickle),
    *(_bytes, _cut, _grown),
)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One valid archive with one to three faults."""
    result = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        change = chance.choice(MUTATIONS)
        # Nothing more is done to what has no directory left, or not a whole one.
        with suppress(struct.error, IndexError, ValueError):
            change(result, chance)
    return bytes(result)


def judge(data: bytes) -> str:
    """One word for what we and torch.load make of an archive."""
    ours = outcome(data)
    if isinstance(ours, SourceError):
        return "refused"
    theirs = _theirs(data)
    if isinstance(theirs, Exception):
        return "laxer"
    return "same" if same(ours, theirs) else "differ"


def _compare(seed: int, first: int, count: int, done: Any, counts: Any) -> None:
    made = seeds()
    for number in range(first, first + count):
        done.value = number
        chance = random.Random(seed << 32 | number)
        data = mutated(chance.choice(made), chance)
        word = judge(data)
        counts.send((word, number if word in ("differ", "laxer") else None))
    counts.send(None)


def run(seed: int, count: int) -> tuple[Counter[str], list[tuple[str, int]]]:
    """Outcomes of `count` executions, and the numbers of those to look at."""
    context = multiprocessing.get_context("fork")
    words: Counter[str] = Counter()
    odd: list[tuple[str, int]] = []
    first = 0
    while first < count:
        done = context.Value("q", first)
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_compare, args=(seed, first, count - first, done, send))
        child.start()
        send.close()
        try:
            while (found := receive.recv()) is not None:
                words[found[0]] += 1
                if found[1] is not None:
                    odd.append((found[0], found[1]))
            child.join()
            return words, odd
        except EOFError:
            child.join()
        # torch.load died of it: what do we say?
        number = done.value
        chance = random.Random(seed << 32 | number)
        ours = outcome(mutated(chance.choice(seeds()), chance))
        words["refused" if isinstance(ours, SourceError) else "died"] += 1
        first = number + 1
    return words, odd


if __name__ == "__main__":
    torch.set_num_threads(1)
    found, odd = run(int(sys.argv[1]), int(sys.argv[2]))
    for word in ("same", "refused", "laxer", "differ", "died"):
        print(word, found[word])
    if odd:
        print(sorted(odd)[:20], file=sys.stderr)
