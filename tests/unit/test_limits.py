"""Every limit of FORMAT.md: at it a sample is written, verified and read; beyond it both sides refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forge import Shard, change_index, envelope, forge, numbers, pack
from readers import READERS, read
from samples import write_root

import hsstream as hs
from hsstream.cli import main
from hsstream.codecs import codec_from_header, parse_codec
from hsstream.errors import FormatError, SampleError
from hsstream.header import MAX_HEADER_BYTES, MAX_MEMBER_BYTES, Header
from hsstream.recode import Recode, recode
from hsstream.sample import MAX_TOKENS, Sample
from hsstream.schema import MAX_LAYERS, DatasetInfo, TensorSpec, schema_of
from hsstream.storage import open_store
from hsstream.table import SampleTable
from hsstream.verify import verify

IDS = {"input_ids": torch.arange(4)}


def nest(levels: int) -> Any:
    """Maps and lists in each other."""
    value: Any = 7
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


def is_good(root: Path) -> bool:
    list(hs.ShardReader(root))
    return verify(open_store(root), deep=True).ok


def refused(root: Path) -> str:
    """The reason for which verify and a reader refuse the only sample of a root; they agree."""
    with pytest.raises(FormatError) as caught:
        list(hs.ShardReader(root))
    assert caught.value.reason in {each.reason for each in verify(open_store(root), deep=True).findings}
    return caught.value.reason


def rename(old: str, new: str) -> Any:
    def change(shard: Shard) -> None:
        header = shard.members.pop(f"{old}.msgpack")
        shard.members = {f"{new}.msgpack": header} | {
            name.replace(f"{old}.", f"{new}.", 1): data for name, data in shard.members.items()
        }
        shard.change_header(new, lambda body: body.update(key=new))

    return change


def test_keys_have_56_characters(tmp_path: Path) -> None:
    assert is_good(write_root(tmp_path / "a", made={"k" * 56: IDS}))
    with pytest.raises(SampleError, match="1 to 56 characters"):
        write_root(tmp_path / "b", made={"k" * 57: IDS})
    root = forge(write_root(tmp_path / "c", made={"k": IDS}), rename("k", "k" * 57))
    assert refused(root) == "bad_field"


def test_names_of_tensors_have_28_characters(tmp_path: Path) -> None:
    assert is_good(write_root(tmp_path / "a", made={"k": {"t" * 28: torch.ones(4)}}))
    with pytest.raises(SampleError, match="1 to 28 characters"):
        write_root(tmp_path / "b", made={"k": {"t" * 29: torch.ones(4)}})

    def longer(shard: Shard) -> None:
        shard.members[f"k.{'t' * 29}.bin"] = shard.members.pop("k.t.bin")
        shard.change_header("k", lambda body: body["tensors"][0].update(name="t" * 29))
        shard.index["dataset"]["tensors"][0]["name"] = "t" * 29

    assert refused(forge(write_root(tmp_path / "c", made={"k": {"t": torch.ones(4)}}), longer)) == "bad_field"


def test_tensors_have_nine_axes(tmp_path: Path) -> None:
    assert is_good(write_root(tmp_path / "a", made={"k": {"t": torch.ones(4, *[1] * 8)}}))
    with pytest.raises(SampleError, match="too many axes"):
        write_root(tmp_path / "b", made={"k": {"t": torch.ones(4, *[1] * 9)}})

    def more(shard: Shard) -> None:
        shard.change_header("k", lambda body: body["tensors"][0].update(shape=[1] * 9))
        shard.index["dataset"]["tensors"][0]["shape"] = [1] * 9

    root = forge(write_root(tmp_path / "c", made={"k": {"t": torch.ones(4, *[1] * 8)}}), more)
    assert refused(root) == "bad_field"


def test_a_second_axis_has_9999_entries() -> None:
    for layers, fits in ((MAX_LAYERS, True), (MAX_LAYERS + 1, False)):
        spec = TensorSpec("t", torch.uint8, (layers, 1), parse_codec("raw"), "none").to_dict()
        sample = Sample("k", {"t": torch.ones(1, layers, 1)})
        if fits:
            assert TensorSpec.from_dict(spec).layers == layers
            assert schema_of(sample, "fp8", None).tensors[0].layers == layers
            continue
        with pytest.raises(FormatError, match="bad shape"):
            TensorSpec.from_dict(spec)
        with pytest.raises(SampleError, match="more than 9999 layers"):
            schema_of(sample, "fp8", None)
    assert schema_of(Sample("k", {"t": torch.ones(1, MAX_LAYERS + 1)}), "fp8", None).members == 2


def test_samples_have_2_31_tokens_less_one(tmp_path: Path) -> None:
    body = Shard(write_root(tmp_path, made={"k": IDS}) / "hs-000000.tar").header("k")
    body["tensors"][0].update(rows_per_block=1, dtype="uint8", name="t", row_runs=b"", stored=b"", xxh3=b"")
    body["tensors"].append({**body["tensors"][0], "name": "loss_mask"})
    # So many are allowed, but not when nothing is stored of them.
    with pytest.raises(FormatError, match="out of proportion"):
        Header.parse(envelope(pack(body | {"tokens": MAX_TOKENS})))
    with pytest.raises(FormatError, match="2147483648 tokens"):
        Header.parse(envelope(pack(body | {"tokens": MAX_TOKENS + 1})))
    with pytest.raises(SampleError, match=f"1 to {MAX_TOKENS} tokens, got {MAX_TOKENS + 1}"):
        hs.sample.prepare_sample("k", {"t": torch.empty(1, dtype=torch.uint8).expand(MAX_TOKENS + 1)})


@pytest.mark.parametrize("kind", ["meta", "model"])
def test_metadata_and_facts_nest_8_deep(tmp_path: Path, kind: str) -> None:
    def root(name: str, value: Any) -> Path:
        facts = {"a": value} if kind == "model" else None
        with hs.ShardWriter(tmp_path / name, model=facts and hs.ModelInfo(engine_flags=facts)) as writer:
            writer.write("k", IDS, meta={"a": value} if kind == "meta" else None)
        return tmp_path / name

    assert is_good(root("a", nest(7)))
    with pytest.raises(SampleError, match=r"deep"):
        root("b", nest(8))

    def deeper(shard: Shard) -> None:
        if kind == "model":
            shard.index["dataset"]["model"]["engine_flags"] = {"a": nest(8)}
        else:
            shard.change_header("k", lambda body: body.update(meta={"a": nest(8)}))

    assert refused(forge(root("c", 1), deeper)) == "bad_msgpack"


def test_metadata_has_integers_of_64_bits(tmp_path: Path) -> None:
    with hs.ShardWriter(tmp_path) as writer:
        writer.write("k", IDS, meta={"a": 2**64 - 1, "b": -(2**63)})
        for wrong in (2**64, -(2**63) - 1):
            with pytest.raises(SampleError, match="more than 64 bits"):
                writer.write("l", IDS, meta={"a": wrong})
    assert is_good(tmp_path)


def test_headers_have_a_mebibyte(tmp_path: Path) -> None:
    def sized(nbytes: int) -> Any:
        def change(shard: Shard) -> None:
            shard.change_header("k", lambda body: body.update(meta={"text": "x" * 10**6}))
            rest = nbytes - len(shard.members["k.msgpack"])
            shard.change_header("k", lambda body: body.update(meta={"text": "x" * (10**6 + rest)}))
            assert len(shard.members["k.msgpack"]) == nbytes

        return change

    for name, nbytes in (("a", MAX_HEADER_BYTES), ("b", MAX_HEADER_BYTES + 1)):
        root = forge(write_root(tmp_path / name, made={"k": IDS}), sized(nbytes))
        assert is_good(root) if name == "a" else refused(root) == "bad_length"
    with hs.ShardWriter(tmp_path / "c") as writer, pytest.raises(SampleError, match="the header takes"):
        writer.write("k", IDS, meta={"text": "x" * MAX_HEADER_BYTES})


def test_members_are_below_8_gib_and_facts_inside_their_sample(tmp_path: Path) -> None:
    columns = Shard(write_root(tmp_path, made={"k": IDS}) / "hs-000000.tar").index["columns"]

    def table(**change: Any) -> SampleTable:
        return SampleTable.unpack(columns | {name: numbers(value) for name, value in change.items()}, 1)

    assert table(member_sizes=[100, MAX_MEMBER_BYTES - 1]).sizes.tolist() == [[100, MAX_MEMBER_BYTES - 1]]
    for wrong in ([100, MAX_MEMBER_BYTES], [MAX_HEADER_BYTES + 1, 5]):
        with pytest.raises(FormatError, match="impossible size"):
            table(member_sizes=wrong)
    assert table(tokens=[MAX_TOKENS]).tokens.tolist() == [MAX_TOKENS]
    for tokens in (0, MAX_TOKENS + 1):
        with pytest.raises(FormatError, match="impossible number of tokens"):
            table(tokens=[tokens])
    assert len(table(supervised=[2], supervised_first=[1], supervised_last=[2])) == 1
    for count, first, last in ((3, 1, 2), (2, 3, 2), (1, 0, 4)):
        with pytest.raises(FormatError, match="supervised tokens outside of their sample"):
            table(supervised=[count], supervised_first=[first], supervised_last=[last])


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"error": 1}, {"error": 1.0001}),
        ({"error": 1e-9}, {"error": 0}),
        ({"size": "s" * 32}, {"size": "s" * 33}),
    ],
)
def test_parameters_of_bounded(good: dict[str, Any], bad: dict[str, Any]) -> None:
    known = {"error": 0.02, "packed": False, "size": "rms"}
    assert codec_from_header("bounded", known | good).name == "bounded"
    with pytest.raises(FormatError):
        codec_from_header("bounded", known | bad)


def test_steps_are_not_negative(tmp_path: Path) -> None:
    shard = Shard(write_root(tmp_path, last_rows="supervised", ttt_length=1) / "hs-000000.tar")
    block = shard.index["dataset"]
    assert DatasetInfo.from_dict(block | {"ttt_length": 0}).ttt_length == 0
    with pytest.raises(FormatError, match="ttt_length -1"):
        DatasetInfo.from_dict(block | {"ttt_length": -1})


@pytest.mark.parametrize(
    "name", ["../other/hs-000000.tar", "a/hs-000000.tar", ".hs-000000.tar", "a\\b.tar", ""]
)
def test_shards_lie_at_the_root(tmp_path: Path, name: str) -> None:
    root = write_root(tmp_path)
    change_index(root, lambda body: body["shards"][0].update(name=name))
    with pytest.raises(FormatError, match="the list of shards has name"):
        hs.ShardReader(root)


def test_columns_of_a_forged_index_are_what_the_sample_has(tmp_path: Path) -> None:
    """A sample whose index says a limit that it does not reach is refused all the same."""
    root = write_root(tmp_path, made={"k": IDS})
    forge(root, lambda shard: shard.index["columns"].update(tokens=numbers([MAX_TOKENS])))
    assert refused(root) == "manifest_mismatch"


# ---------------------------------------------------------------- members and what their header says


def every_reader(root: Path, tmp_path: Path) -> set[str]:
    """Reasons for which each way to read a root refuses it."""
    reasons = {refused(root)}
    for how in READERS:
        error = read(how, root)[1]
        reasons.add(error.reason if isinstance(error, FormatError) else f"{how}: {error}")
    for codec in (None, "planes"):
        with pytest.raises(FormatError) as caught:
            recode(Recode([str(root)], str(tmp_path / f"{codec}"), codec=codec))
        reasons.add(caught.value.reason)
    return reasons


@pytest.mark.parametrize("extension", ["input_ids.bin", "aux_hidden_states.1.fp8", "last_hidden_state.fp8"])
@pytest.mark.parametrize("change", [b"x", None])
def test_a_member_longer_or_shorter_than_its_header_says(
    tmp_path: Path, extension: str, change: bytes | None
) -> None:
    root = write_root(tmp_path / "root", (30,), compression="none")

    def resize(shard: Shard) -> None:
        data = shard.members[f"s0.{extension}"]
        shard.members[f"s0.{extension}"] = data[:-1] if change is None else data + change

    assert every_reader(forge(root, resize), tmp_path) == {"bad_length"}
    assert main(["cat", str(root), "s0"]) != 0


@pytest.mark.parametrize("codec", ["fp8", "bounded:0.02"])
def test_a_block_with_extras_is_not_taken_as_plain(tmp_path: Path, codec: str) -> None:
    """As long as its rows alone: what is decoded at once, by one call, has no extras."""
    root = write_root(tmp_path / "root", (30,), codec=codec, compression="none")
    assert is_good(root)

    def more(shard: Shard) -> None:
        shard.change_header("s0", lambda body: body["tensors"][3].update(extras=pack_u4(5)))

    assert every_reader(forge(root, more), tmp_path) == {"bad_length"}


def pack_u4(value: int) -> bytes:
    return value.to_bytes(4, "little")
