"""torch.save files are read as torch.load reads them, or refused; nothing in one is run."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import forge, outcome, same

from hsstream.errors import SourceError
from hsstream.sources import content
from hsstream.sources.archive import Archive
from hsstream.sources.content import Content, in_memory
from hsstream.sources.torchfile import load_torch, opened_dict

BASE = torch.arange(24.0).bfloat16()
USUAL: dict[str, Any] = {
    "input_ids": torch.arange(7),
    "loss_mask": torch.tensor([0, 1, 1, 0, 1, 1, 1]),
    "aux_hidden_state": torch.randn(1, 7, 12).bfloat16(),
    "half": torch.randn(7, 3).half(),
    "float": torch.randn(7, 3),
    "double": torch.randn(7, 3).double(),
    "bool": torch.tensor([True, False]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "int": torch.arange(5, dtype=torch.int32),
    "short": torch.arange(5, dtype=torch.int16),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0),
    "part": BASE[3:9].view(2, 3),
    "turned": BASE.view(4, 6).T,
    "again": BASE,
    "spread": torch.ones(1).expand(9),
    "grad": torch.ones(3, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "layers": [torch.ones(2, 3), torch.zeros(2, 3)],
    "state": torch.nn.Linear(3, 2).state_dict(),
    "nested": {"a": {"b": torch.ones(3)}, 1: (2, 3)},
    "id": "conversation 17",
    "number": 300_000,
    "large": 1 << 60,
    "negative": -5,
    "fraction": 0.25,
    "nothing": None,
    "yes": True,
}


def saved(value: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **settings)
    return file.getvalue()


def read(data: bytes) -> Any:
    archive = Archive(in_memory(bytearray(data)))
    return archive.value(archive.saved)


def test_a_file_is_read_as_torch_reads_it() -> None:
    data = saved(USUAL)
    assert same(read(data), torch.load(io.BytesIO(data), weights_only=True))


@pytest.mark.parametrize(
    "value", [torch.ones(3), [torch.ones(3)], {f"t{n}": torch.ones(1) for n in range(300)}]
)
def test_whatever_holds_tensors_is_read(value: Any) -> None:
    assert same(read(saved(value)), value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a": torch.ones(3, dtype=torch.complex64)}, "torch.ComplexFloatStorage"),
        ({"a": torch.ones(3).to(torch.float8_e4m3fn)}, "torch.storage.UntypedStorage|torch._utils"),
        ({"a": torch.ones(3).to_sparse()}, "_rebuild_sparse_tensor"),
        ({"a": Path("x")}, "pathlib"),
        ({(1, 2): torch.ones(3)}, "a tuple as a key"),
    ],
)
def test_what_is_no_tensor_text_or_number_is_named(value: Any, name: str) -> None:
    with pytest.raises(SourceError, match=rf"(?s){name}.*nothing of it was run"):
        read(saved(value))


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_a_storage_is_no_tensor() -> None:
    with pytest.raises(SourceError, match="a bare storage"):
        read(saved({"a": [torch.ones(3).storage()]}))


def changed(data: bytes, name: str, new: bytes | None, method: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with one member's content (None: kept) or its compression replaced."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(result, "w") as made:
        for member in old.namelist():
            mine = member.endswith(name)
            code = new if mine and new is not None else old.read(member)
            made.writestr(member, code, method if mine else zipfile.ZIP_STORED)
    return result.getvalue()


def test_a_deflated_member_is_inflated_not_taken_for_the_tensor() -> None:
    value = {"a": torch.arange(3000), "b": torch.ones(3)}
    data = changed(saved(value), "data/0", None, zipfile.ZIP_DEFLATED)
    assert len(data) < len(saved(value))
    assert same(read(data), value)


def test_a_member_of_another_size_than_its_tensor_is_refused() -> None:
    """torch.load reads on in memory behind a short one."""
    data = saved({"a": torch.ones(3)})
    for new in (b"short", bytes(8), bytes(16)):
        with pytest.raises(SourceError, match=r"data/0 holds .* bytes, its tensor needs 12"):
            read(changed(data, "data/0", new))
    with pytest.raises(SourceError, match="little-endian"):
        read(changed(data, "byteorder", b"big"))


def test_a_tensor_that_reaches_behind_its_member_is_refused() -> None:
    data = saved({"a": torch.ones(8)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        code = archive.read("archive/data.pkl")
    # The shape (8,) comes behind the storage's own 8.
    at = code.rindex(b"K\x08\x85")
    with pytest.raises(SourceError, match="not a readable torch file"):
        read(changed(data, "data.pkl", code[:at] + b"K\x09\x85" + code[at + 3 :]))


LOCAL, ENTRY = b"PK\x03\x04", b"PK\x01\x02"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("method", "contradicts the directory"),
        ("length", "contradicts the directory"),
        ("encrypted", "neither stored nor deflated"),
        ("directory", "neither stored nor deflated"),
        ("size", "neither stored nor deflated|overlap|reaches behind"),
        ("overlap", "overlap|contradicts"),
        ("twice", "twice"),
        ("case", "can be mistaken"),
        ("other", "can be mistaken"),
        ("ends", "contradict each other"),
        ("comment", "does not end as an archive"),
    ],
)
def test_directories_that_lie_are_refused(change: str, text: str) -> None:
    data = bytearray(saved({"a": torch.ones(3), "b": torch.zeros(3)}))
    entry = data.index(ENTRY, data.index(b"archive/data/1", data.index(ENTRY)) - 46)
    local = struct.unpack_from("<L", data, entry + 42)[0]
    assert data[local : local + 4] == LOCAL
    if change == "method":
        data[entry + 10] = 8
    elif change == "length":
        data[local + 26] += 1
    elif change == "encrypted":
        data[entry + 8] |= 1
        data[local + 6] |= 1
    elif change == "directory":
        data[entry + 38] |= 0x10
    elif change == "size":
        data[entry + 20 : entry + 24] = struct.pack("<L", 1 << 20)
    elif change == "overlap":
        data[entry + 42 : entry + 46] = struct.pack("<L", local - 64)
    elif change in ("twice", "case", "other"):
        new = {"twice": b"archive/data/0", "case": b"archive/DATA/1", "other": b"brchive/data/1"}[change]
        for at in (local + 30, entry + 46):
            data[at : at + len(new)] = new
        if change == "case":
            data = bytearray(forge({"data/1": b"x", "DATA/1": b"x"}))
    elif change == "ends":
        data[-6] ^= 1
    else:
        data += b"!"
    with pytest.raises(SourceError, match=text):
        read(bytes(data))


def test_large_archives_have_wide_offsets() -> None:
    """As torch writes them behind 4 GiB: 32-bit fields of all ones, the numbers in the extra field."""
    data = bytearray(saved({"a": torch.arange(3)}))
    at = data.index(ENTRY)
    wide = bytearray()
    start = at
    while data[at : at + 4] == ENTRY:
        length = struct.unpack_from("<H", data, at + 28)[0]
        packed, size = struct.unpack_from("<2L", data, at + 20)
        local = struct.unpack_from("<L", data, at + 42)[0]
        entry = bytearray(data[at : at + 46 + length])
        entry[20:28], entry[42:46] = b"\xff" * 8, b"\xff" * 4
        entry[30:32] = struct.pack("<H", 28)
        wide += entry + struct.pack("<2H3Q", 1, 24, size, packed, local)
        at += 46 + length
    count = struct.unpack_from("<H", data, len(data) - 12)[0]
    end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(wide), start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + len(wide), 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, *(0xFFFF,) * 2, *(0xFFFFFFFF,) * 2, 0)
    whole = bytes(data[:start] + wide + end + locator + last)
    assert same(read(whole), {"a": torch.arange(3)})


class Marked:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code of a file was run')",))


@pytest.mark.parametrize(
    "code",
    [
        pickle.dumps({"a": Marked()}, 2),
        pickle.dumps(Marked(), 2),
        # Tensors of nothing, without end, behind the archive; calls of what is no function.
        b"\x80\x02}(X\x01\x00\x00\x00actorch\nFloatStorage\n)Ru.",
        b"\x80\x02}(X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n)Ru.",
        b"\x80\x02}X\x01\x00\x00\x00acos\nsystem\n(X\x02\x00\x00\x00lstRs.",
        b"\x80\x02}r\xff\xff\xff\xff.",
        b"\x80\x02X\xff\xff\xff\xffa.",
        b"\x80\x02}(u.",
        b"\x80\x02(((((.",
        b"\x80\x02",
        b"\x80\x02}}.",
        b"\x80\x02}h\x01.",
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02)" + b"\x85" * 100_000 + b".",
        b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.",
    ],
)
def test_nothing_in_a_pickle_is_run(code: bytes) -> None:
    try:
        assert read(changed(saved({"a": torch.ones(3)}), "data.pkl", code)) == {}
    except SourceError:
        return


def test_members_that_inflate_without_end_are_refused() -> None:
    data = saved({"a": torch.zeros(1 << 20)})
    bomb = bytearray(changed(data, "data/0", None, zipfile.ZIP_DEFLATED))
    at = bomb.index(b"data/0", bomb.index(ENTRY)) - len("archive/")
    for place in (at - 46 + 24, bomb.index(b"archive/data/0") - 30 + 22):
        bomb[place : place + 4] = struct.pack("<L", 1 << 30)
    with pytest.raises(SourceError, match="inflates to 1073741824 bytes"):
        read(bytes(bomb))


def test_mutated_archives_give_what_torch_load_gives_or_an_error() -> None:
    """A thousand of the executions that DESIGN.md speaks of; torch.load in a process that may die of one."""
    found = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "archives.py"), "7", "1000"],
        capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout.split()  # fmt: skip
    counts = dict(zip(found[::2], map(int, found[1::2]), strict=True))
    assert counts["differ"] == 0
    assert counts["same"] > 100
    assert counts["refused"] > 100
    assert sum(counts.values()) == 1000


def test_damage_is_never_worse_than_an_error() -> None:
    data, chance = saved(USUAL), random.Random(0)
    for _ in range(400):
        broken = bytearray(data[: chance.choice((len(data), chance.randrange(len(data))))])
        for _ in range(chance.randrange(1, 6)):
            if broken:
                broken[chance.randrange(len(broken))] = chance.randrange(256)
        assert outcome(bytes(broken)) is not None


def test_only_what_is_asked_for_is_read_of_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(saved({"ids": torch.arange(50), "states": torch.zeros(3_000_000)}))
    assert (tmp_path / "a.pt").stat().st_size > content.SMALL_BYTES
    assert list(load_torch(tmp_path / "a.pt", ("ids",))) == ["ids"]
    asked: list[int] = []

    with content.opened(tmp_path / "a.pt") as whole:

        def counted(offset: int, size: int) -> memoryview:
            asked.append(size)
            return whole.read(offset, size)

        archive = Archive(Content(whole.size, counted))
        assert torch.equal(archive.value(archive.saved["ids"]), torch.arange(50))
    assert sum(asked) < 10_000


def test_a_file_that_is_cut_while_it_is_read_is_an_error_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(saved({"ids": torch.arange(50), "states": torch.zeros(3_000_000)}))
    with opened_dict(path) as record:
        assert len(record["ids"]) == 50
        os.truncate(path, 5_000_000)
        with pytest.raises(SourceError, match="the file ends at byte 5000000"):
            record["states"]


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(SourceError, match="not a regular file"):
        load_torch(tmp_path / "a.pt")
