"""Make the golden data of one format version, once. `python tests/golden/make_golden.py v1.0`

Goldens are never made again: a reader of every later version must read these bytes as they are. So this
refuses to write where something lies already. What a reader must deliver is stored as raw bits in
`expected/`, computed here from the values alone, or by a second reader (`tests/reference.py`) where the
encoder has a choice, and not through the codecs of the library.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from forge import Shard, change_index, forge, replace  # noqa: E402
from reference import read_shard  # noqa: E402
from samples import bits, states, tensors  # noqa: E402

import hsstream as hs  # noqa: E402
from hsstream import encoding  # noqa: E402
from hsstream.manifest import commit_all  # noqa: E402
from hsstream.runs import reachable_runs  # noqa: E402
from hsstream.sample import DTYPES  # noqa: E402
from hsstream.storage import open_store  # noqa: E402

Made = dict[str, dict[str, torch.Tensor]]
COMPRESSIONS = ("none", "lz4", "zstd")
STATES = ("float16", "bfloat16", "float32")
SHARD = "hs-000000.tar"
MODEL = hs.ModelInfo(
    name="golden/model",
    revision="0123abc",
    hidden_size=16,
    num_layers=6,
    aux_layer_ids=(1, 3),
    layer_id_convention="layer_output_0based",
    last_hidden_norm="post",
    aux_hidden_norm=("pre", "unknown"),
    tokenizer="golden/tokenizer",
    chat_template_hash="00ff",
    vocab_size=1000,
    engine="golden engine 1.2",
    engine_flags={"chunked_prefill": False, "note": "é"},
    versions={"torch": "2.0"},
)
META: dict[str, Any] = {
    "text": "é",
    "number": -(2**63),
    "large": 2**64 - 1,
    "real": 0.1,
    "bytes": b"\x00\xff",
    "nothing": None,
    "list": [True, {"deep": [[]]}],
}


def fp8_values(value: torch.Tensor) -> torch.Tensor:
    """What fp8 keeps of values [..., H], by the rule of FORMAT.md section 4, one vector at a time."""
    out = torch.empty_like(value)
    flat, result = value.reshape(-1, value.shape[-1]), out.view(-1, value.shape[-1])
    for source, target in zip(flat, result, strict=True):
        exact = source.double()
        largest = float(exact.abs().max())
        exponent = 0 if largest == 0 else max(-126, math.ceil(math.log2(largest / 448)))
        codes = (exact * 2.0**-exponent).float().to(torch.float8_e4m3fn)
        target.copy_((codes.double() * 2.0**exponent).to(value.dtype))
    return out


def numbers(dtype: str, tokens: int, width: int, seed: int) -> torch.Tensor:
    """Values of any dtype: a compressible part, extremes, and noise."""
    kind, rng = DTYPES[dtype], np.random.default_rng([seed, width])
    if kind is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, (tokens, width), np.uint8)).bool()
    if kind.is_floating_point:
        made = torch.from_numpy(rng.standard_normal((tokens, width))).to(kind)
        info = torch.finfo(kind)
        extremes = torch.tensor(
            [info.max, info.min, info.smallest_normal, -info.tiny, 0.0, -0.0, 1.0], dtype=kind
        )
    else:
        info = torch.iinfo(kind)  # type: ignore[assignment]
        made = torch.from_numpy(
            rng.integers(info.min, info.max, (tokens, width), np.int64, endpoint=True)
        ).to(kind)
        extremes = torch.tensor([info.max, info.min, 0, 1], dtype=kind)
    made[0, : len(extremes)] = extremes[:width]
    made[1 : 1 + tokens // 2] = made[1]
    made[tokens - 1] = 0
    return made


def every_codec(tokens: int, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, str]]:
    """Every dtype in every codec and compression: tensors, codecs, compressions by name."""
    tensors_, codecs, packing = {}, {}, {}
    for number, (codec, dtype, compression) in enumerate(combinations()):
        name = f"{codec}_{dtype}_{compression}"
        if codec == "fp8":
            value = states(tokens, 9, seed=seed + number, dtype=torch.float32) * 10.0 ** (number % 5 - 2)
            value[tokens - 1] = 0
            value[0] *= 1000
            value = value.to(DTYPES[dtype])
        else:
            value = numbers(dtype, tokens, 9, seed + number)
        tensors_[name], codecs[name], packing[name] = value, codec, compression
    return tensors_, codecs, packing


def combinations() -> list[tuple[str, str, str]]:
    dtypes = {"raw": tuple(DTYPES), "planes": ("float16", "bfloat16"), "fp8": STATES}
    return [(codec, dtype, c) for codec, names in dtypes.items() for dtype in names for c in COMPRESSIONS]


def write(
    root: Path, made: Made, meta: dict[str, Any] | None = None, block: int | None = None, **options: Any
) -> None:
    size = block or encoding.BLOCK_CODE_BYTES
    with mock.patch.object(encoding, "BLOCK_CODE_BYTES", size), hs.ShardWriter(root, **options) as writer:
        for number, (key, sample) in enumerate(made.items()):
            writer.write(key, sample, meta={"number": number} if meta is None else meta)


def delivered(made: Made, lossy: Callable[[str], bool]) -> Made:
    """Samples as a reader must give them."""
    wanted = {"input_ids": torch.int64, "target_topk_ids": torch.int64, "loss_mask": torch.bool}
    return {
        key: {
            name: (fp8_values(value) if lossy(name) else value).to(wanted.get(name, value.dtype))
            for name, value in sample.items()
        }
        for key, sample in made.items()
    }


# -- good data sets: each writes below `root` and returns what its reader must deliver -------------------


def codecs(root: Path) -> Made:
    """Every dtype, codec and compression, one block each."""
    made = {f"s{n}": every_codec(tokens, n)[0] for n, tokens in enumerate((5, 11))}
    _, codec, compression = every_codec(5, 0)
    write(root, made, codec=codec, compression=compression)
    return delivered(made, lambda name: name.startswith("fp8"))


def blocks(root: Path) -> Made:
    """Many blocks, layers, tensors of one to five axes, every kind of metadata, all model facts."""
    made = {}
    for number, tokens in enumerate((17, 1, 24)):
        others = {
            "flat": numbers("float64", tokens + 3, 9, number)[:tokens, 0].clone(),
            "cube": states(tokens, 2, 2, 2, 3, seed=number, dtype=torch.float32),
            "wide_states": states(tokens, 1, 24, seed=number, dtype=torch.float16),
        }
        made[f"B{number}_-{'x' * 50}"] = tensors(tokens, seed=number) | others
    write(root, made, META, block=100, model=MODEL, codec="fp8", compression="zstd")
    return delivered(made, lambda name: name.endswith(("hidden_states", "hidden_state")))


def bounded(root: Path) -> Made:
    """Both packings of `bounded`, each float dtype, odd and even widths, with escapes and without."""
    made: Made = {}
    for number, tokens in enumerate((7, 20)):
        made[f"s{number}"] = {}
        for dtype in STATES:
            for width in (8, 9):
                value = states(tokens, 2, width, seed=number, dtype=torch.float32)
                value[0] = 0
                value[1, 0, 3] = 1e4
                value[tokens - 1] *= 1e-38 if dtype != "float16" else 1e-6
                for error in ("005", "025"):
                    made[f"s{number}"][f"{dtype}_{width}_{error}"] = value.to(DTYPES[dtype])
    codec = {name: f"bounded:0.{name[-2:]}" for name in made["s0"]}
    packing = {name: COMPRESSIONS[n % 3] for n, name in enumerate(codec)}
    write(root, made, block=64, codec=codec, compression=packing)
    return {key: tensors_ for key, (tensors_, _) in read_shard(root / SHARD).items()}


def layers(root: Path) -> Made:
    """Captured layers whose errors differ."""
    write(root, {f"s{n}": tensors(6, seed=n) for n in range(2)}, codec="bounded:0.4..0.1")
    return {key: tensors_ for key, (tensors_, _) in read_shard(root / SHARD).items()}


def row_runs(root: Path) -> Made:
    """Only the teacher rows that a loss can reach are stored."""
    made = {f"s{n}": tensors(40, seed=n) for n in range(3)}
    for number, sample in enumerate(made.values()):
        sample["loss_mask"] = torch.zeros(40, dtype=torch.bool)
        sample["loss_mask"][[[], [0, 39], [7, 8, 25]][number]] = True
    write(root, made, block=64, codec="raw", last_rows="supervised", ttt_length=2)
    for sample in made.values():
        kept = torch.zeros(40, 1, dtype=torch.bool)
        for first, count in reachable_runs(sample["loss_mask"], 2).tolist():
            kept[first : first + count] = True
        sample["last_hidden_state"] = torch.where(kept, sample["last_hidden_state"], 0)
    return delivered(made, lambda name: False)


def teacher(root: Path) -> Made:
    """The sparse teacher, bfloat16 logits, no hidden states; ids alone decide the rest."""
    made = {}
    for number, tokens in enumerate((4, 9)):
        made[f"s{number}"] = {
            "input_ids": torch.arange(tokens) - 1,
            "loss_mask": torch.ones(tokens, dtype=torch.bool),
            "target_topk_ids": torch.arange(tokens * 3).view(tokens, 3),
            "target_topk_logits": states(tokens, 3, seed=number),
            "target_logsumexp": states(tokens, seed=number, dtype=torch.float32),
        }
    write(root, made)
    return delivered(made, lambda name: False)


def writers(root: Path) -> Made:
    """Two writers under their own names, several shards each, three samples written by both."""
    made = {f"s{n}": tensors(3 + n, layers=1, hidden=8, seed=n) for n in range(7)}
    options: dict[str, Any] = {"shard_samples": 2, "commit": False}
    with (
        hs.ShardWriter(root, name="rank-0", **options) as one,
        hs.ShardWriter(root, name="rank-1", **options) as two,
    ):
        for number, (key, sample) in enumerate(made.items()):
            for writer in [one] * (number < 5) + [two] * (number >= 2):
                writer.write(key, sample, meta={"by": "both"})
    commit_all(open_store(root))
    return delivered(made, lambda name: name.endswith(("hidden_states", "hidden_state")))


def later(root: Path) -> Made:
    """What a later minor version might add: fields and facts that this one ignores."""
    made = {f"s{n}": tensors(4, seed=n) for n in range(2)}
    write(root, made, codec="planes", model=MODEL)

    def change(shard: Shard) -> None:
        for key in shard.keys():
            shard.change_header(key, new_fields)
        new_fields(shard.index)
        new_fields(shard.index["dataset"])
        shard.index["dataset"]["model"]["sparkle"] = [1]
        shard.index["columns"]["sparkle"] = ["<u1", b"\0\0"]

    forge(root, change)
    return delivered(made, lambda name: False)


def new_fields(body: dict[str, Any]) -> None:
    body["sparkle"] = {"new": True}
    if "hsstream" in body:
        body["hsstream"] = [1, 9]
    for entry in body.get("tensors", []):
        entry["sparkle"] = None


GOOD: dict[str, Callable[[Path], Made]] = {
    made.__name__: made for made in (codecs, blocks, bounded, layers, row_runs, teacher, writers, later)
}

# -- bad data sets: one for every reason ------------------------------------------------------------------


def plain(root: Path) -> Path:
    write(root, {f"s{n}": tensors(4, seed=n) for n in range(2)}, compression="lz4")
    return root


def header_change(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda root: forge(plain(root), lambda shard: shard.change_header("s0", change))


def foreign(root: Path) -> None:
    root.mkdir()
    with tarfile.open(root / "photos.tar", "w") as tar:
        entry = tarfile.TarInfo("s0.jpg")
        entry.size = 2000
        tar.addfile(entry, io.BytesIO(bytes(2000)))


def cut(root: Path) -> None:
    path = plain(root) / SHARD
    replace(path, path.read_bytes()[:-10_240])
    alone(root)


def flipped(root: Path) -> None:
    with tarfile.open(plain(root) / SHARD) as tar:
        at = tar.getmember("s0.last_hidden_state.fp8").offset_data + 5
    data = bytearray((root / SHARD).read_bytes())
    data[at] ^= 0x10
    replace(root / SHARD, bytes(data))


def one_block(key: str, extension: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    """Change the only block of a member, with right hashes."""

    def at(root: Path) -> None:
        forge(plain(root), lambda s: s.set_blocks(key, extension, [change(s.members[f"{key}.{extension}"])]))

    return at


def broken_tar(root: Path) -> None:
    data = bytearray((plain(root) / SHARD).read_bytes())
    data[3] ^= 0x10
    replace(root / SHARD, bytes(data))


def lost_member(root: Path) -> None:
    def change(shard: Shard) -> None:
        for key in shard.keys():
            shard.members.pop(f"{key}.loss_mask.bin")

    forge(plain(root), change)


def two_contents(root: Path) -> None:
    plain(root)
    write(root / "other", {"s1": tensors(4, seed=9)}, name="other")
    shutil.move(root / "other/other-000000.tar", root)
    shutil.rmtree(root / "other")
    alone(root)


def replaced(root: Path) -> None:
    plain(root)
    shard = Shard(root / SHARD)
    shard.change_header("s0", lambda body: body.update(meta={"number": 5}))
    shard.settle()
    replace(root / SHARD, shard.data())


def next_version(root: Path) -> None:
    forge(plain(root), lambda shard: shard.index.update(hsstream=[2, 0]))


def next_feature(root: Path) -> None:
    change_index(plain(root), lambda index: index.update(features=["sparkle"]))


def alone(root: Path) -> None:
    """Leave the shards only."""
    for path in (root / "manifest.json", *root.glob("index-*")):
        path.unlink(missing_ok=True)


BAD: dict[str, Callable[[Path], Any]] = {
    "not_hsstream": foreign,
    "truncated": cut,
    "hash_mismatch": flipped,
    "bad_length": header_change(lambda body: body["tensors"][2].update(stored=b"\0\0\0")),
    "bad_msgpack": lambda root: forge(plain(root), lambda shard: shard.set_header("s0", b"\xc1")),
    "bad_field": header_change(lambda body: body.update(tokens=0)),
    "bad_code": one_block("s0", "last_hidden_state.fp8", lambda block: block[:-1] + b"\x7f"),
    "bad_compression": one_block("s0", "input_ids.bin", lambda block: b"\xff" * (len(block) - 1)),
    "bad_tar": broken_tar,
    "missing_member": lost_member,
    "duplicate_key": two_contents,
    "manifest_mismatch": replaced,
    "unsupported_version": next_version,
    "unknown_feature": next_feature,
}


# -- writing it all down ----------------------------------------------------------------------------------


def save_expected(path: Path, made: Made, root: Path) -> None:
    """path.npz: the raw bits by KEY/TENSOR; path.json: keys in order, metadata, dtypes and shapes."""
    facts: dict[str, Any] = {}
    arrays = {}
    for sample in hs.ShardReader(root):
        forms = {}
        for name, value in made[sample.key].items():
            dtype, shape, raw = bits(value)
            forms[name] = [dtype, list(shape)]
            arrays[f"{sample.key}/{name}"] = np.frombuffer(raw, np.uint8)
        facts[sample.key] = {"meta": repr(sample.meta), "tensors": forms}
    path.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    np.savez_compressed(path.with_suffix(".npz"), **arrays)


def sums(root: Path) -> str:
    """A line for every file: SHA-256 and path."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    return "".join(
        f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(root).as_posix()}\n" for p in files
    )


def main(version: str, at: Path = HERE) -> None:
    target = at / version
    if target.exists():
        raise SystemExit(f"{target} exists, and goldens are never made again")
    (target / "expected").mkdir(parents=True)
    for name, make in GOOD.items():
        save_expected(target / "expected" / name, make(target / "good" / name), target / "good" / name)
    for reason, spoil in BAD.items():
        (target / "bad").mkdir(exist_ok=True)
        spoil(target / "bad" / reason)
    (target / "SHA256SUMS").write_text(sums(target))


if __name__ == "__main__":
    main(sys.argv[1])
