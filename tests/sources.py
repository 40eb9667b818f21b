"""Writers of every source layout as the programs themselves write it, and what they wrote, canonically.

`write_specforge(root, made)` and its like take canonical samples by key and lay them out; all of them have
`input_ids`, `loss_mask`, and where the format has them `aux_hidden_states`, `last_hidden_state`.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors.torch import load_file, save_file

__all__ = ["load_file", "save_file"]
Tensors = Mapping[str, torch.Tensor]
LAYERS, HIDDEN, VOCABULARY = 3, 16, 1000


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normally distributed values, the same for the same seed."""
    maker = torch.Generator().manual_seed(seed * 1000 + sum(shape))
    return torch.randn(*shape, generator=maker).to(dtype)


def sample(
    tokens: int,
    seed: int = 0,
    layers: int = LAYERS,
    hidden: int = HIDDEN,
    dtype: torch.dtype = torch.bfloat16,
    last: bool = True,
) -> dict[str, torch.Tensor]:
    """A canonical sample whose ids are never 0 and whose last token is supervised."""
    place = torch.arange(tokens)
    made = {"input_ids": place * 7 % 990 + 1 + seed % 9, "loss_mask": (place + tokens) % 3 == 0}
    made["loss_mask"][-1] = True
    if layers:
        made["aux_hidden_states"] = draw(tokens, layers, hidden, seed=seed, dtype=dtype)
    if last:
        made["last_hidden_state"] = draw(tokens, hidden, seed=seed + 1, dtype=dtype)
    return made


def samples(lengths: tuple[int, ...] = (5, 12, 3, 40), **shape: Any) -> list[dict[str, torch.Tensor]]:
    """One canonical sample of every length."""
    return [sample(tokens, seed=number, **shape) for number, tokens in enumerate(lengths)]


def long(mask: torch.Tensor) -> torch.Tensor:
    """A mask as the programs store it."""
    return mask.to(torch.int64)


def flat(states: torch.Tensor) -> torch.Tensor:
    """[S, L, H] to [S, L * H]."""
    return states.flatten(1)


def padded(tensor: torch.Tensor, length: int, junk: bool = False) -> torch.Tensor:
    """Right-padded with zeros, or with what a model makes of padding tokens."""
    more = (length - len(tensor), *tensor.shape[1:])
    tail = draw(*more, seed=99, dtype=tensor.dtype) if junk else torch.zeros(more, dtype=tensor.dtype)
    return torch.cat([tensor, tail])


def save(record: Any, path: Path) -> Path:
    """torch.save, gzipped as the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        with gzip.open(path, "wb", compresslevel=6) as file:
            torch.save(record, file)
    else:
        torch.save(record, path)
    return path


def specforge_record(made: Tensors, length: int = 0, strategy: str = "eagle3") -> dict[str, torch.Tensor]:
    """One sample of SpecForge, padded to `length` as its batch was."""
    length = max(length, len(made["input_ids"]))
    record = {
        "input_ids": padded(made["input_ids"].long(), length),
        "loss_mask": padded(long(made["loss_mask"]), length),
    }
    aux = padded(flat(made["aux_hidden_states"]), length, junk=True)[None]
    if strategy == "eagle3":
        last = padded(made["last_hidden_state"], length, junk=True)[None]
        return record | {"hidden_state": last, "aux_hidden_state": aux}
    record["hidden_states"] = aux
    if strategy == "dspark":
        record["target_last_hidden_states"] = padded(made["last_hidden_state"], length, junk=True)[None]
    return record


def write_specforge(
    root: Path,
    made: list[dict[str, torch.Tensor]],
    strategy: str = "eagle3",
    length: int = 0,
    end: str = ".ckpt",
) -> dict[str, Tensors]:
    """`rows_0-2000/data_N.ckpt`."""
    for number, each in enumerate(made):
        group = number // 2000 * 2000
        path = root / f"rows_{group}-{group + 2000}" / f"data_{number}{end}"
        save(specforge_record(each, length, strategy), path)
    save({"d2t": torch.zeros(8, dtype=torch.int64), "t2d": torch.arange(VOCABULARY) < 8},
         root / "vocab_mapping" / "vocab_mapping.pt")  # fmt: skip
    return {f"data_{number}": each for number, each in enumerate(made)}


def write_arrow(path: Path, made: list[dict[str, torch.Tensor]]) -> Path:
    """speculators' preprocessed data set."""
    rows = {
        "input_ids": [each["input_ids"].tolist() for each in made],
        "loss_mask": [long(each["loss_mask"]).tolist() for each in made],
        "seq_len": [len(each["input_ids"]) for each in made],
        "messages": ["" for _ in made],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(path))
    return path


def quantised(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """hs_connectors' fp8: codes and one scale a token over all its layers."""
    exact = states.float()
    scales = (exact.abs().amax(dim=(1, 2), keepdim=True) / 448).clamp(min=1e-12)
    return (exact / scales).to(torch.float8_e4m3fn), scales


def dequantised(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As speculators' own reader does it."""
    return codes.to(torch.bfloat16) * scales.to(torch.bfloat16)


def write_speculators(
    root: Path, made: list[dict[str, torch.Tensor]], fp8: bool = False, arrow: bool = True
) -> dict[str, Tensors]:
    """`hidden_states/hs_N.safetensors` and the Arrow data set beside; with fp8, what its reader gives."""
    folder = root / "hidden_states"
    folder.mkdir(parents=True, exist_ok=True)
    expected = {}
    for number, each in enumerate(made):
        states = torch.cat([each["aux_hidden_states"], each["last_hidden_state"][:, None]], dim=1)
        record = {"hidden_states": states, "token_ids": each["input_ids"].long()}
        if fp8:
            codes, scales = quantised(states)
            record |= {"hidden_states": codes, "hidden_states_scales": scales}
            read = dequantised(codes, scales)
            each = {**each, "aux_hidden_states": read[:, :-1], "last_hidden_state": read[:, -1]}
        save_file(record, str(folder / f"hs_{number}.safetensors"))
        expected[f"hs_{number}"] = each
    if arrow:
        write_arrow(root / "arrow", made)
    return expected


def write_speculators_legacy(
    root: Path, made: list[dict[str, torch.Tensor]], first: bool = False
) -> dict[str, Tensors]:
    """`data_N.pt` of 0.4 and before, or of the first release."""
    for number, each in enumerate(made):
        record: dict[str, Any] = {"input_ids": each["input_ids"].long(), "loss_mask": long(each["loss_mask"])}
        if first:
            record |= {"hidden_state": flat(each["aux_hidden_states"]), "target": each["last_hidden_state"]}
        else:
            layers = [layer.contiguous() for layer in each["aux_hidden_states"].unbind(1)]
            record["hidden_states"] = [*layers, each["last_hidden_state"]]
        save(record, root / f"data_{number}.pt")
    save(torch.ones(100), root / "token_freq.pt")
    return {f"data_{number}": each for number, each in enumerate(made)}


def write_modelopt(
    root: Path, made: list[dict[str, torch.Tensor]], prenorm: bool | None = None, mask: bool = True
) -> dict[str, Tensors]:
    """`CONVERSATION_ID.pt` of the Hugging Face and vLLM dumps; `prenorm` is written where it is given."""
    expected = {}
    for number, each in enumerate(made):
        name = f"conv-{number:03d}"
        record: dict[str, Any] = {
            "input_ids": each["input_ids"].long(),
            "hidden_states": each["last_hidden_state"],
            "aux_hidden_states": flat(each["aux_hidden_states"])
            if "aux_hidden_states" in each
            else torch.empty(0),
            "conversation_id": name,
        }
        if mask:
            record["loss_mask"] = long(each["loss_mask"])
        if prenorm is not None:
            record["hidden_states_prenorm"] = prenorm
        save(record, root / f"{name}.pt")
        ones = torch.ones_like(each["loss_mask"])
        expected[name] = each if mask else {**each, "loss_mask": ones}
    return expected


def write_eagle(root: Path, made: list[dict[str, torch.Tensor]]) -> dict[str, Tensors]:
    """`WORKER/data_N.ckpt`, two workers."""
    expected = {}
    for number, each in enumerate(made):
        record = {
            "input_ids": each["input_ids"].long(),
            "hidden_state": each["last_hidden_state"],
            "loss_mask": long(each["loss_mask"]),
        }
        worker, place = number % 2, number // 2
        save(record, root / f"{worker}" / f"data_{place}.ckpt")
        expected[f"{worker}--data_{place}"] = each
    return expected


def write_angelslim(
    root: Path, made: list[dict[str, torch.Tensor]], dflash: bool = False
) -> dict[str, Tensors]:
    """`rows_0-100/data_N.ckpt`, or the padded samples of DFlash with their attention mask."""
    expected = {}
    for number, each in enumerate(made):
        record = {"input_ids": each["input_ids"].long()[None], "loss_mask": long(each["loss_mask"])[None]}
        record["hidden_states"] = flat(each["aux_hidden_states"])[None]
        if not dflash:
            record["target_hiddens"] = each["last_hidden_state"][None]
            save(record, root / "rows_0-100" / f"data_{number}.ckpt")
            expected[f"rows_0-100--data_{number}"] = each
            continue
        length = len(each["input_ids"]) + 3
        record = {
            name: padded(value[0], length, junk=name == "hidden_states")[None]
            for name, value in record.items()
        }
        record["attention_mask"] = (torch.arange(length) < length - 3).long()[None]
        save(record, root / "shard_00000" / f"sample_{number:08d}_rank0.ckpt")
        kept = {name: value for name, value in each.items() if name != "last_hidden_state"}
        expected[f"shard_00000--sample_{number:08d}_rank0"] = kept
    return expected


def write_deepspec(root: Path, made: list[dict[str, torch.Tensor]], per_shard: int = 3) -> dict[str, Tensors]:
    """`manifest.json`, `samples.idx`, `shard-00000.bin`, ..."""
    root.mkdir(parents=True, exist_ok=True)
    names = ("input_ids", "attention_mask", "loss_mask", "aux_hidden_states", "last_hidden_state")
    kinds = {"input_ids": torch.int32, "attention_mask": torch.uint8, "loss_mask": torch.uint8}
    index, shards = b"", []
    for first in range(0, len(made), per_shard):
        number, data = first // per_shard, b""
        for offset, each in enumerate(made[first : first + per_shard]):
            full = {**each, "attention_mask": torch.ones(len(each["input_ids"]))}
            places = []
            for name in names:
                places.append(len(data))
                value = full[name].to(kinds.get(name, torch.bfloat16)).contiguous()
                data += value.view(torch.uint8).numpy().tobytes()
            index += struct.pack("<QIIQQQQQ", first + offset, number, len(each["input_ids"]), *places)
        name = f"shard-{number:05d}.bin"
        (root / name).write_bytes(data)
        shards.append({"shard_id": number, "file_name": name})
    (root / "samples.idx").write_bytes(index)
    width, layers = made[0]["last_hidden_state"].shape[1], made[0]["aux_hidden_states"].shape[1]
    manifest = {
        "version": 2,
        "num_samples": len(made),
        "num_shards": len(shards),
        "target_layer_ids": [1 + 8 * layer for layer in range(layers)],
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": width,
        "shards": shards,
        "target_model_name_or_path": "some/model",
        "chat_template": "none",
        "max_length": 4096,
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return {f"sample-{number}": each for number, each in enumerate(made)}


def _shifted(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value[1:], torch.zeros_like(value[:1])])


def write_nemo(
    root: Path,
    made: list[dict[str, torch.Tensor]],
    kind: str = "eagle3",
    per_shard: int = 3,
    mask: bool = True,
) -> dict[str, Tensors]:
    """`manifest.json` and stacked shards. kind: eagle3, topk (the same with sparse targets) or dspark."""
    root.mkdir(parents=True, exist_ok=True)
    length = max(len(each["input_ids"]) for each in made) + 2
    rows, expected = [], {}
    for number, each in enumerate(made):
        tokens, eagle3 = len(each["input_ids"]), kind != "dspark"
        shift = _shifted if eagle3 else (lambda value: value)
        row = {
            "input_ids": shift(each["input_ids"].long()),
            "loss_mask": shift(long(each["loss_mask"])),
            "attention_mask": torch.ones(tokens, dtype=torch.int64),
        }
        if eagle3:
            row["aux_hidden_states"] = flat(each["aux_hidden_states"])
            row["position_mask"] = (row["loss_mask"] > 0)[:, None]
            if kind == "topk":
                row["target_probs_values"] = draw(tokens, 4, seed=number).abs()
                row["target_probs_indices"] = torch.arange(4, dtype=torch.int32).expand(tokens, 4)
            else:
                row["target_probs"] = draw(tokens, 10, seed=number).abs()
        else:
            row["target_hidden_states"] = flat(each["aux_hidden_states"])
            row["target_last_hidden_states"] = each["last_hidden_state"]
            if not mask:
                del row["attention_mask"]
        rows.append({name: padded(value, length, value.is_floating_point()) for name, value in row.items()})
        key = f"shard-{number // per_shard:06d}--{number % per_shard}"
        keep = ("position_mask", "target_probs", "target_probs_values", "target_probs_indices")
        known = {
            name: row[name].flatten(1)[:, 0] if name == "position_mask" else row[name]
            for name in keep
            if name in row
        }
        left = {name: value for name, value in each.items() if not eagle3 or name != "last_hidden_state"}
        ids = {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"]}
        expected[key] = left | ids | known
    for first in range(0, len(rows), per_shard):
        stacked = {
            name: torch.stack([row[name] for row in rows[first : first + per_shard]]) for name in rows[0]
        }
        save_file(stacked, str(root / f"shard-{first // per_shard:06d}.safetensors"))
    save_file({"weight": torch.zeros(20, 4)}, str(root / "target_embeddings.safetensors"))
    layers = made[0]["aux_hidden_states"].shape[1]
    manifest = {
        "format_version": 1 if kind == "dspark" else 2,
        "target_model": "some/model",
        "target_vocab_size": 1000,
        "seq_length": length,
        "dtype": "bf16",
        "num_samples": len(made),
        "shard_size": per_shard,
        "target_layer_ids" if kind == "dspark" else "aux_layer_ids": [1 + layer for layer in range(layers)],
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return expected


def write_plain(
    root: Path, made: list[dict[str, torch.Tensor]], end: str = ".safetensors"
) -> dict[str, Tensors]:
    """Canonical tensors under their own names."""
    root.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(made):
        path = root / f"s{number}{end}"
        if end == ".safetensors":
            save_file({name: value.contiguous() for name, value in each.items()}, str(path))
        else:
            save({**each, "topic": "tests"}, path)
    return {f"s{number}": each for number, each in enumerate(made)}
