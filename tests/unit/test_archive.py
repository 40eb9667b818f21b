"""The usual torch file is read as torch.load reads it; whatever else is left to torch.load."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hsstream.errors import SourceError
from hsstream.sources import torchfile
from hsstream.sources.archive import read_archive
from hsstream.sources.torchfile import load_torch

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
    "part": BASE[3:9].view(2, 3),
    "turned": BASE.view(4, 6).T,
    "again": BASE,
    "id": "conversation 17",
    "number": 300_000,
    "negative": -5,
    "fraction": 0.25,
    "nothing": None,
    "yes": True,
}


def saved(value: Any) -> bytearray:
    file = io.BytesIO()
    torch.save(value, file)
    return bytearray(file.getvalue())


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.stride() == theirs.stride() and torch.equal(ours, theirs)
    return type(ours) is type(theirs) and ours == theirs


def test_the_usual_file_is_read_as_torch_reads_it() -> None:
    data = saved(USUAL)
    found, theirs = read_archive(data), torch.load(io.BytesIO(data), weights_only=True)
    assert found is not None
    assert list(found) == list(theirs)
    assert all(same(found[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3),
        [torch.ones(3)],
        {"a": {"b": torch.ones(3)}},
        {"a": [torch.ones(3)]},
        {1: torch.ones(3)},
        {"a": torch.ones(3, requires_grad=True)},
        {"a": torch.nn.Parameter(torch.ones(3))},
        {"a": torch.ones(3, dtype=torch.complex64)},
        {"a": torch.ones(3).to(torch.float8_e4m3fn)},
        {"a": torch.ones(3).to_sparse()},
        {"a": torch.ones(0)},
        {"a": Path("x")},
        {f"t{n}": torch.ones(1) for n in range(300)},
    ],
)
def test_anything_else_is_left_to_torch(value: Any) -> None:
    assert read_archive(saved(value)) is None


def changed(data: bytes, name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> bytearray:
    """The archive with one member's content replaced."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(result, "w", method) as new:
        for member in old.namelist():
            new.writestr(member, content if member.endswith(name) else old.read(member))
    return bytearray(result.getvalue())


def test_an_archive_that_torch_did_not_write_like_this_is_left_to_it() -> None:
    data = saved({"a": torch.ones(3)})
    assert read_archive(changed(data, "nothing", b"")) is not None
    assert read_archive(changed(data, "byteorder", b"big")) is None
    assert read_archive(changed(data, "data/0", b"short")) is None
    assert read_archive(changed(data, "nothing", b"", zipfile.ZIP_DEFLATED)) is None
    assert read_archive(bytearray(pickle.dumps({"a": 1}))) is None
    assert read_archive(bytearray()) is None


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
    ],
)
def test_nothing_in_a_pickle_is_run(code: bytes) -> None:
    data = changed(saved({"a": torch.ones(3)}), "data.pkl", code)
    assert read_archive(data) in (None, {})


def test_a_tensor_that_reaches_behind_its_member_is_left_to_torch(tmp_path: Path) -> None:
    data = bytes(saved({"a": torch.ones(8)}))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        code = archive.read(name)
    # The shape (8,) comes behind the storage's own 8.
    at = code.rindex(b"K\x08\x85")
    forged = changed(data, "data.pkl", code[:at] + b"K\x09\x85" + code[at + 3 :])
    assert read_archive(forged) is None
    (tmp_path / "a.pt").write_bytes(forged)
    with pytest.raises(SourceError, match="not a readable torch file"):
        load_torch(tmp_path / "a.pt")


def test_damage_is_never_worse_than_an_error(tmp_path: Path) -> None:
    data, chance = bytes(saved(USUAL)), random.Random(0)
    for _ in range(400):
        broken = bytearray(data[: chance.choice((len(data), chance.randrange(len(data))))])
        for _ in range(chance.randrange(1, 6)):
            if broken:
                broken[chance.randrange(len(broken))] = chance.randrange(256)
        (tmp_path / "a.pt").write_bytes(broken)
        try:
            found = load_torch(tmp_path / "a.pt")
        except SourceError:
            continue
        assert found is not None


def test_a_small_file_is_read_without_torch_load_and_a_large_one_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.pt").write_bytes(saved(USUAL))
    calls: list[bool] = []
    monkeypatch.setattr(torchfile, "_load", lambda _, mapped: calls.append(mapped) or {})
    assert len(load_torch(tmp_path / "a.pt")) == len(USUAL)
    assert calls == []
    monkeypatch.setattr(torchfile, "SMALL_BYTES", 100)
    load_torch(tmp_path / "a.pt")
    assert calls == [True]
