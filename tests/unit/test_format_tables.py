"""The tables and numbers of FORMAT.md are those of the code and of the bytes it writes."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from forge import Shard, read_index
from samples import MODEL, write_root

from hsstream import blocks, header, model_info, sample, schema, shard, table, writer
from hsstream.codecs import CODECS, codec_from_header
from hsstream.codecs.base import Codec
from hsstream.errors import REASONS, SampleError

TEXT = (Path(__file__).parents[2] / "hsstream/FORMAT.md").read_text()
#: Parameters with which a codec's class is asked about its row of the table.
PARAMS: dict[str, dict[str, Any]] = {"bounded": {"error": 0.02, "packed": False, "size": "rms"}}


def rows(first: str) -> list[list[str]]:
    """The table whose first column is called so: its rows, cells without backquotes."""
    lines = TEXT.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    body = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return body
        body.append([cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")])
    return body


def column(first: str, number: int = 0) -> list[str]:
    return [row[number] for row in rows(first)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set that uses every field: some rows stored, model facts, a tensor with extra bytes if any."""
    facts = MODEL.to_dict() | {"aux_layer_ids": [1, 2]}
    return write_root(
        tmp_path_factory.mktemp("root"), model=sample.ModelInfo(**facts), last_rows="supervised", ttt_length=3
    )


@pytest.fixture(scope="module")
def body(root: Path) -> dict[str, Any]:
    return Shard(root / "hs-000000.tar").header("s0")


def test_version() -> None:
    assert TEXT.splitlines()[0] == "# The hsstream format, version {}.{}".format(*header.FORMAT_VERSION)
    assert f"features a reader must know; `{'`, `'.join(sorted(header.FEATURES))}` in this version" in TEXT


def test_dtypes() -> None:
    sizes = {name: re.match(r"\d+", size)[0] for name, size in rows("dtype")}  # type: ignore[index]
    assert sizes == {name: str(dtype.itemsize) for name, dtype in sample.DTYPES.items()}


def test_canonical_tensors_in_their_order() -> None:
    named = {
        name: (shape.count(",") + 1, None if dtype == "float" else sample.DTYPES[dtype])
        for name, shape, dtype, _ in rows("name")
    }
    assert list(named.items()) == list(sample.CANONICAL.items())


def test_patterns_and_limits_of_names_and_samples() -> None:
    rules = dict(rows("thing"))
    key = f"[A-Za-z0-9][A-Za-z0-9_-]{{0,{table.MAX_KEY - 1}}}"
    assert rules["key"] == f"{key}, unique in the data set"
    assert sample.KEY_PATTERN.pattern == key
    assert rules["tensor name"] == f"{sample.NAME_PATTERN.pattern}, not msgpack"
    assert (rules["tokens S"], sample.MAX_TOKENS) == ("1 to 2^31 - 1", 2**31 - 1)
    assert f"at most {schema.MAX_LAYERS:,} entries" in rules["tensor"]
    assert f"nested at most {sample.MAX_NESTING} deep" in rules["metadata"]
    assert f"NAME is the writer's, `{writer.NAME_PATTERN.pattern}`" in TEXT


@pytest.mark.parametrize(
    "sentence",
    [
        f"A plain block has at most\n{header.MAX_PLAIN_BLOCK:,} bytes",
        f"at most {header.MAX_HEADER_BYTES:,}\nbytes",
        f"below {blocks.WORTHWHILE:.0%}".replace("%", " %"),
        f"A member is below {header.MAX_MEMBER_BYTES >> 30} GiB",
        f"a multiple of {shard.RECORD_BYTES:,}",
        f"lies exactly\n{shard.END_BYTES:,} bytes before the end of the file",
        f"a footer of {shard.FOOTER.size} bytes",
        f"The last member, `{shard.INDEX_NAME}`",
        f"magic `{shard.MAGIC.decode()}`",
        " or ".join(f"`{kind}`" for kind in table.COLUMN_TYPES).replace(" or ", ", ", 2),
    ],
)
def test_numbers_in_the_text(sentence: str) -> None:
    assert " ".join(sentence.split()) in " ".join(TEXT.split())


def codec_rows() -> list[tuple[Codec, list[str]]]:
    assert column("codec") == list(CODECS)
    return [(codec_from_header(row[0], PARAMS.get(row[0], {})), row) for row in rows("codec")]


def test_codecs() -> None:
    for codec, (name, sources, scales, _, params, _) in codec_rows():
        assert codec.scaled == (scales == "yes")
        known = [part for part in re.split(r"[ ,]+", params) if part not in ("none", "")]
        assert {part for part in known if part.isidentifier()} >= CODECS[name][0]
        accepted = [dtype for dtype in sample.DTYPES if takes(codec, sample.DTYPES[dtype])]
        assert sources == ("all" if len(accepted) == len(sample.DTYPES) else ", ".join(accepted))


def takes(codec: Codec, dtype: torch.dtype) -> bool:
    try:
        codec.check(dtype)
    except SampleError:
        return False
    return True


def test_code_bytes_a_row() -> None:
    sizes = {"V x H x bytes of the dtype": 3 * 5 * 2, "V x H x 2": 3 * 5 * 2, "V x H": 3 * 5}
    for codec, (_, _, _, formula, *_) in codec_rows():
        assert codec.row_bytes(torch.bfloat16, 3, 5) == sizes[formula.split(";")[0]]
    packed = codec_from_header("bounded", PARAMS["bounded"] | {"packed": True})
    assert next(row[3] for row in rows("codec") if row[0] == "bounded").endswith(
        "V x ceil(H / 2) when packed"
    )
    assert packed.row_bytes(torch.bfloat16, 3, 5) == 3 * 3


def test_compressions() -> None:
    assert column("compression") == list(schema.COMPRESSIONS)


def test_header_fields(body: dict[str, Any]) -> None:
    assert column("field") == list(body)


def test_tensor_fields(body: dict[str, Any]) -> None:
    optional = [row[0] for row in rows("tensor field") if "optional" in row[1]]
    assert optional == ["extras", "row_runs"]
    written = [*body["tensors"][-1]]
    assert [field for field in column("tensor field") if field != "extras" or field in written] == written


def tables_after(section: str) -> list[list[str]]:
    """First columns of the tables of a section."""
    part = TEXT.split(f"\n## {section}")[1].split("\n## ")[0]
    found, table = [], []
    for line in [*part.splitlines(), ""]:
        if line.startswith("|"):
            table.append(line.strip("|").split("|")[0].strip())
        elif table:
            found.append([name for cell in table[2:] for name in re.findall(r"`([^`]+)`", cell)])
            table = []
    return found


def test_index_fields(root: Path) -> None:
    index = Shard(root / "hs-000000.tar").index
    _, fields_, columns, dataset = tables_after("6. Shard index")
    assert fields_ == list(index)
    assert sorted(columns) == sorted(index["columns"])
    assert dataset == list(index["dataset"])


def test_consolidated_index_and_manifest_fields(root: Path) -> None:
    index = read_index(root)
    more, manifest = tables_after("7. Consolidated index")
    shard_index = Shard(root / "hs-000000.tar").index
    assert set(index) == set(shard_index) - {"writer"} | set(more)
    written = json.loads((root / "manifest.json").read_text())
    assert manifest == list(written)
    totals = TEXT.split("| `totals` | ")[1].split(" |")[0]
    assert sorted(totals.replace("`", "").split(", ")) == sorted(written["totals"])
    listed = TEXT.split("| `shards` | for each shard ")[1].split(" (of its index)")[0]
    assert listed.replace("`", "").split(", ") == list(written["shards"][0])


def test_reasons() -> None:
    assert column("reason") == list(REASONS)


def test_model_facts() -> None:
    assert column("fact") == [field.name for field in fields(model_info.ModelInfo)]
    meanings = dict(rows("fact"))
    assert [choice for choice in model_info.CONVENTIONS if choice in meanings["layer_id_convention"]] == list(
        model_info.CONVENTIONS
    )
    assert meanings["last_hidden_norm"].startswith("pre, post or unknown")
    assert model_info.NORM_CHOICES == ("pre", "post", "unknown")
