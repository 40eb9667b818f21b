"""Importers: every producer's layout gives canonical samples, and nothing hostile gets further than that."""

from __future__ import annotations

import gzip
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sources as made_by
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from sources import Tensors, draw, flat, long, sample, samples, save, specforge_record

from hsstream.errors import HsStreamError, SampleError, SourceError, StorageError
from hsstream.sample import KEY_PATTERN
from hsstream.sources import detect, torchfile
from hsstream.sources.base import Loaded, Options
from hsstream.sources.detect import FORMATS, EmptySourceError, open_source
from hsstream.sources.files import key_of, walk
from hsstream.sources.shapes import real_tokens, require_rows
from hsstream.sources.torchfile import load_torch

Written = dict[str, Tensors]


def fp16(root: Path) -> Written:
    return made_by.write_eagle(root, samples(layers=0, dtype=torch.float16))


#: Case -> format that must be detected, writer, options it needs.
CASES: dict[str, tuple[str, Callable[[Path], Written], dict[str, Any]]] = {
    "specforge": ("specforge", lambda p: made_by.write_specforge(p, samples()), {}),
    "specforge-gz": ("specforge", lambda p: made_by.write_specforge(p, samples(), end=".ckpt.gz"), {}),
    "specforge-dspark": ("specforge", lambda p: made_by.write_specforge(p, samples(), "dspark"), {}),
    "specforge-dflash": (
        "specforge",
        lambda p: made_by.write_specforge(p, samples(last=False), "dflash"),
        {"layers": 3},
    ),
    "speculators": ("speculators", lambda p: made_by.write_speculators(p, samples()), {"arrow": "arrow"}),
    "speculators-fp8": (
        "speculators",
        lambda p: made_by.write_speculators(p, samples(), fp8=True),
        {"arrow": "arrow"},
    ),
    "speculators-0.4": (
        "speculators-legacy",
        lambda p: made_by.write_speculators_legacy(p, samples()),
        {},
    ),
    "speculators-first": (
        "speculators-legacy",
        lambda p: made_by.write_speculators_legacy(p, samples(), first=True),
        {},
    ),
    "modelopt": ("modelopt", lambda p: made_by.write_modelopt(p, samples()), {"last_norm": "pre"}),
    "modelopt-flag": ("modelopt", lambda p: made_by.write_modelopt(p, samples(), prenorm=True), {}),
    "modelopt-trtllm": (
        "modelopt",
        lambda p: made_by.write_modelopt(p, samples(layers=0), mask=False),
        {"last_norm": "post", "all_supervised": True},
    ),
    "deepspec": ("deepspec", lambda p: made_by.write_deepspec(p, samples()), {}),
    "nemo": ("nemo", lambda p: made_by.write_nemo(p, samples()), {}),
    "nemo-topk": ("nemo", lambda p: made_by.write_nemo(p, samples(), "topk"), {}),
    "nemo-dspark": ("nemo", lambda p: made_by.write_nemo(p, samples(), "dspark"), {}),
    "angelslim": ("angelslim", lambda p: made_by.write_angelslim(p, samples()), {}),
    "angelslim-dflash": (
        "angelslim",
        lambda p: made_by.write_angelslim(p, samples(), dflash=True),
        {"layers": 3},
    ),
    "eagle": ("eagle", fp16, {}),
    "safetensors": ("safetensors", lambda p: made_by.write_plain(p, samples()), {"last_norm": "post"}),
    "torch": ("torch", lambda p: made_by.write_plain(p, samples(), ".pt"), {"last_norm": "post"}),
    "torch-gz": ("torch", lambda p: made_by.write_plain(p, samples(), ".pt.gz"), {"last_norm": "post"}),
}


def options_of(root: Path, given: dict[str, Any]) -> Options:
    """The options of a case; the Arrow data set lies below its root."""
    return Options(**({**given, "arrow": root / given["arrow"]} if "arrow" in given else given))


def load_all(root: Path, name: str = "auto", **given: Any) -> dict[str, Loaded]:
    source = open_source(root, name, options_of(root, given))
    return {item.key: source.load(file, item) for file in source.files() for item in file.items}


def kept(loaded: Loaded) -> dict[str, torch.Tensor]:
    """The tensors of the real tokens."""
    if loaded.attention_mask is None:
        return loaded.tensors
    return {name: value[loaded.attention_mask.bool()] for name, value in loaded.tensors.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_layout_gives_the_canonical_samples(case: str, tmp_path: Path) -> None:
    name, write, given = CASES[case]
    expected = write(tmp_path)
    assert detect.detect(tmp_path).format == name
    found = load_all(tmp_path, **given)
    assert found.keys() == expected.keys()
    for key, wanted in expected.items():
        tensors = kept(found[key])
        assert tensors.keys() == wanted.keys()
        for tensor, value in wanted.items():
            assert torch.equal(tensors[tensor].to(value.dtype), value), (key, tensor)
            assert tensors[tensor].is_floating_point() == value.is_floating_point()


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_of_a_source_are_those_of_its_files(case: str, tmp_path: Path) -> None:
    _, write, given = CASES[case]
    write(tmp_path)
    source = open_source(tmp_path, "auto", options_of(tmp_path, given))
    assert source.nbytes() == sum(file.path.stat().st_size for file in source.files()) > 0


def test_a_format_can_be_named_and_must_exist(tmp_path: Path) -> None:
    made_by.write_plain(tmp_path, samples(), ".ckpt")
    assert set(load_all(tmp_path, "torch", last_norm="post")) == {"s0", "s1", "s2", "s3"}
    with pytest.raises(SampleError, match="unknown format 'x'"):
        open_source(tmp_path, "x", Options())
    with pytest.raises(StorageError, match="no such file"):
        open_source(tmp_path / "nowhere", "auto", Options())
    assert "speculators-legacy" not in FORMATS


def test_speculators_by_name_takes_its_old_files_too(tmp_path: Path) -> None:
    made_by.write_speculators_legacy(tmp_path, samples())
    assert len(load_all(tmp_path, "speculators", all_supervised=True)) == 4


def test_unknown_files_are_refused_with_their_keys(tmp_path: Path) -> None:
    save({"weights": torch.ones(3)}, tmp_path / "model.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SampleError, match=r"model\.pt \(weights\).*--from"):
        detect.detect(tmp_path)
    with pytest.raises(EmptySourceError, match="no file ends in"):
        detect.detect(tmp_path / "empty")


def test_one_unreadable_file_does_not_hide_the_format(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path, samples())
    (tmp_path / "rows_0-2000" / "data_0.ckpt").write_bytes(b"cut")
    assert detect.detect(tmp_path).format == "specforge"


# --- facts of each format


def test_padding_is_cut_as_far_as_no_target_can_tell(tmp_path: Path) -> None:
    one = sample(20)
    one["loss_mask"][:] = False
    one["loss_mask"][4] = True
    for name, supervised in (("a", 4), ("b", 19)):
        each = {**one, "loss_mask": one["loss_mask"].clone()}
        each["loss_mask"][supervised] = True
        save(specforge_record(each, length=64), tmp_path / f"{name}.ckpt")
    found = load_all(tmp_path)
    # Up to the last real id; and as far behind the last supervised token as seven steps reach.
    assert len(found["a"].tensors["input_ids"]) == 20
    assert len(found["b"].tensors["input_ids"]) == 19 + 1 + 7
    assert (found["a"].padding, found["b"].padding) == (44, 64 - 27)
    assert torch.equal(found["b"].tensors["aux_hidden_states"][:20], one["aux_hidden_states"])


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.booleans(), min_size=30, max_size=30),
    st.integers(1, 9),
)
def test_the_trim_rule_loses_no_id_and_no_target(ids: list[int], mask: list[bool], steps: int) -> None:
    tokens, supervised = torch.tensor(ids), torch.tensor(mask[: len(ids)])
    if not tokens.any() and not supervised.any():
        with pytest.raises(SourceError, match="padding"):
            real_tokens(tokens, supervised, steps, 0)
        return
    kept_tokens = real_tokens(tokens, supervised, steps, 0)
    assert not tokens[kept_tokens:].any()
    for place in torch.nonzero(supervised).flatten().tolist():
        assert kept_tokens >= min(len(ids), place + 1 + steps)


def test_a_stack_of_layers_without_a_width_needs_one(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path, samples(last=False), "dflash")
    with pytest.raises(SampleError, match="--layers or --hidden-size"):
        load_all(tmp_path)
    assert load_all(tmp_path, hidden_size=16)["data_0"].tensors["aux_hidden_states"].shape[1:] == (3, 16)
    with pytest.raises(SourceError, match="48 wide, which is not 4 layers of 16"):
        load_all(tmp_path, hidden_size=16, layers=4)
    with pytest.raises(SourceError, match="48 wide, which is not 5 layers"):
        load_all(tmp_path, layers=5)


def test_vision_tensors_of_angelslim_are_kept(tmp_path: Path) -> None:
    one = sample(6)
    record = {
        "input_ids": one["input_ids"][None],
        "loss_mask": long(one["loss_mask"])[None],
        "hidden_states": flat(one["aux_hidden_states"])[None],
        "target_hiddens": one["last_hidden_state"][None],
        "position_ids": torch.arange(18).reshape(3, 1, 6),
        "inputs_embeds": draw(1, 6, 16),
    }
    save(record, tmp_path / "data_0.ckpt")
    found = load_all(tmp_path)["data_0"].tensors
    assert found["mrope_position_ids"].tolist() == record["position_ids"][:, 0].T.tolist()
    assert torch.equal(found["inputs_embeds"], record["inputs_embeds"][0])


def test_modelopt_keeps_the_conversation_and_says_its_norm(tmp_path: Path) -> None:
    made_by.write_modelopt(tmp_path, samples(), prenorm=False)
    source = open_source(tmp_path, "auto", Options())
    file = next(iter(source.files()))
    loaded = source.load(file, file.items[0])
    assert loaded.meta == {"conversation_id": "conv-000"}
    assert (loaded.norm, source.norm_of(loaded)) == ("post", "post")
    wrong = open_source(tmp_path, "auto", Options(last_norm="pre"))
    with pytest.raises(SourceError, match="says that its last hidden state is post-norm"):
        wrong.norm_of(loaded)


def test_norms_are_the_producers_habit_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    habits = {"specforge": "post", "speculators-0.4": "pre", "modelopt": None, "angelslim": "post"}
    for case, habit in habits.items():
        CASES[case][1](tmp_path / case)
        for said, expected in ((None, habit), ("pre", "pre")):
            source = open_source(tmp_path / case, "auto", Options(last_norm=said))
            file = next(iter(source.files()))
            assert source.norm_of(source.load(file, file.items[0])) == expected, case


def test_nemo_marks_shifted_caches_and_only_those(tmp_path: Path) -> None:
    made_by.write_nemo(tmp_path / "a", samples())
    made_by.write_nemo(tmp_path / "b", samples(), "dspark")
    assert all(loaded.meta == {"shifted": True} for loaded in load_all(tmp_path / "a").values())
    assert all(loaded.meta == {} for loaded in load_all(tmp_path / "b").values())
    facts = open_source(tmp_path / "a", "auto", Options()).facts()
    assert facts["engine_flags"] == {"shifted": True}
    assert (facts["name"], facts["vocab_size"], facts["aux_layer_ids"]) == ("some/model", 1000, (1, 2, 3))


def test_nemo_without_attention_mask_is_cut_by_the_safe_rule(tmp_path: Path) -> None:
    expected = made_by.write_nemo(tmp_path, samples(), "dspark", mask=False)
    for key, loaded in load_all(tmp_path).items():
        tokens = len(expected[key]["input_ids"])
        assert tokens <= len(loaded.tensors["input_ids"]) <= tokens + 7
        states = loaded.tensors["aux_hidden_states"][:tokens]
        assert torch.equal(states, expected[key]["aux_hidden_states"])


def test_deepspec_knows_its_model(tmp_path: Path) -> None:
    made_by.write_deepspec(tmp_path, samples())
    facts = open_source(tmp_path, "auto", Options()).facts()
    assert facts == {"aux_layer_ids": (1, 9, 17), "hidden_size": 16, "name": "some/model"}


def test_speculators_needs_its_masks_or_a_word(tmp_path: Path) -> None:
    made_by.write_speculators(tmp_path, samples(), arrow=False)
    with pytest.raises(SampleError, match="--arrow DIR, or --all-supervised"):
        load_all(tmp_path)
    found = load_all(tmp_path, all_supervised=True)
    assert all(bool(loaded.tensors["loss_mask"].all()) for loaded in found.values())


def test_speculators_checks_the_tokens_against_the_arrow_row(tmp_path: Path) -> None:
    made = samples((5, 5, 6))
    made_by.write_speculators(tmp_path, made)
    hidden = tmp_path / "hidden_states"
    (hidden / "hs_0.safetensors").rename(hidden / "x")
    (hidden / "hs_2.safetensors").rename(hidden / "hs_0.safetensors")
    with pytest.raises(SourceError, match="of 6 tokens, row 0 of the Arrow data set has 5"):
        load_all(tmp_path, arrow="arrow")
    (hidden / "hs_1.safetensors").rename(hidden / "hs_0.safetensors")
    with pytest.raises(SourceError, match="5 others: states of another request"):
        load_all(tmp_path, arrow="arrow")
    (hidden / "hs_0.safetensors").rename(hidden / "hs_7.safetensors")
    with pytest.raises(SourceError, match="has 3 rows, none for number 7"):
        load_all(tmp_path, arrow="arrow")
    with pytest.raises(SampleError, match="not a data set of load_from_disk"):
        load_all(tmp_path, arrow="hidden_states")


def test_raw_dumps_of_vllm_have_no_row(tmp_path: Path) -> None:
    made_by.write_speculators(tmp_path, samples((4,)))
    dump = tmp_path / "cmpl-1234-0.safetensors"
    (tmp_path / "hidden_states" / "hs_0.safetensors").rename(dump)
    with pytest.raises(SampleError, match="only hs_N files have a row"):
        load_all(tmp_path, arrow="arrow")
    assert set(load_all(tmp_path, all_supervised=True)) == {"cmpl-1234-0"}


def test_fp8_codes_come_with_their_sample_and_its_scale_rounded(tmp_path: Path) -> None:
    expected = made_by.write_speculators(tmp_path, samples(), fp8=True)
    for key, loaded in load_all(tmp_path, arrow="arrow").items():
        stored = made_by.load_file(tmp_path / "hidden_states" / f"{key}.safetensors")
        members = [*loaded.codes["aux_hidden_states"], *loaded.codes["last_hidden_state"]]
        for layer, codes in enumerate(members):
            assert torch.equal(codes.codes, stored["hidden_states"][:, layer].view(torch.uint8))
            assert codes.scales is not None
            assert torch.equal(
                codes.scales.flatten(), stored["hidden_states_scales"].bfloat16().float().flatten()
            )
        assert torch.equal(loaded.tensors["last_hidden_state"], expected[key]["last_hidden_state"])


@pytest.mark.parametrize("fault", ["nan-code", "nan-scale", "zero-scale", "shape", "overflow", "dtype"])
def test_fp8_files_that_are_not_what_they_say_are_refused(fault: str, tmp_path: Path) -> None:
    codes, scales = made_by.quantised(draw(5, 4, 16))
    if fault == "nan-code":
        codes.view(torch.uint8)[2, 1, 3] = 0x7F
    elif fault == "overflow":
        scales[0] = 3e38
    elif fault == "shape":
        scales = scales[:4]
    elif fault == "dtype":
        codes = codes.to(torch.float8_e5m2)
    else:
        scales[1] = float("nan") if fault == "nan-scale" else 0.0
    record = {"hidden_states": codes, "hidden_states_scales": scales, "token_ids": torch.arange(1, 6)}
    save_file(record, str(tmp_path / "hs_0.safetensors"))
    with pytest.raises(SourceError):
        load_all(tmp_path, all_supervised=True)


# --- states that do not fit their tokens


@pytest.mark.parametrize("case", ["specforge", "speculators", "modelopt", "angelslim", "eagle", "torch"])
@pytest.mark.parametrize("rows", [-2, 3])
def test_more_or_fewer_states_than_tokens_are_refused_by_name(case: str, rows: int, tmp_path: Path) -> None:
    one = sample(10, dtype=torch.float16)
    one["aux_hidden_states"], one["last_hidden_state"] = draw(10 + rows, 3, 16), draw(10 + rows, 16)
    _write_one(case, tmp_path, one)
    text = (
        "2 too few: a prefix cache or chunked prefill"
        if rows < 0
        else "3 too many: states of another request"
    )
    with pytest.raises(SourceError, match=text):
        load_all(tmp_path, all_supervised=True, last_norm="pre")


def _write_one(case: str, root: Path, one: dict[str, torch.Tensor]) -> None:
    ids, mask = one["input_ids"].long(), long(one["loss_mask"])
    aux, last = one["aux_hidden_states"], one["last_hidden_state"]
    record: dict[str, Any] = {"input_ids": ids, "loss_mask": mask}
    if case == "specforge":
        save(record | {"aux_hidden_state": flat(aux)[None], "hidden_state": last[None]}, root / "data_0.ckpt")
    elif case == "speculators":
        states = torch.cat([aux, last[:, None]], dim=1)
        save_file({"hidden_states": states, "token_ids": ids}, str(root / "hs_0.safetensors"))
    elif case == "modelopt":
        extra = {"aux_hidden_states": flat(aux), "hidden_states": last, "conversation_id": 3}
        save(record | extra, root / "3.pt")
    elif case == "angelslim":
        save(record | {"hidden_states": flat(aux)[None], "target_hiddens": last[None]}, root / "data_0.ckpt")
    elif case == "eagle":
        save(record | {"hidden_state": last}, root / "data_0.ckpt")
    else:
        save(record | {"aux_hidden_states": aux, "last_hidden_state": last}, root / "s.pt")


def test_rows_are_named_before_anything_else() -> None:
    tensors = {"input_ids": torch.ones(4), "x": torch.ones(3), "y": torch.tensor(1.0)}
    with pytest.raises(SourceError, match="x has 3 rows for 4 tokens, 1 too few"):
        require_rows(tensors)
    with pytest.raises(SourceError, match="y has 0 rows"):
        require_rows({"input_ids": torch.ones(4), "y": torch.tensor(1.0)})


# --- hostile files


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._flag),)


@pytest.mark.parametrize("end", [".ckpt", ".ckpt.gz"])
def test_a_pickle_with_code_is_refused_and_not_run(end: str, tmp_path: Path) -> None:
    flag = tmp_path / "was-run"
    record = specforge_record(sample(5)) | {"extra": Evil(flag)}
    save(record, tmp_path / f"data_0{end}")
    with pytest.raises(SourceError, match="nothing of it was run"):
        load_all(tmp_path, "specforge")
    assert not flag.exists()
    torch.load(save({"extra": Evil(flag)}, tmp_path / "proof"), weights_only=False)
    assert flag.exists()


def test_a_cut_archive_is_refused_at_every_length(tmp_path: Path) -> None:
    path = save(specforge_record(sample(5)), tmp_path / "data_0.ckpt")
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError):
            load_torch(path)


@pytest.mark.parametrize("end", [".pt", ".pt.gz", ".safetensors"])
def test_changed_bytes_never_raise_anything_else(end: str, tmp_path: Path) -> None:
    path = tmp_path / f"s0{end}"
    made_by.write_plain(tmp_path, [sample(4, hidden=2)], end)
    whole, draws = path.read_bytes(), torch.Generator().manual_seed(1)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for place in torch.randint(0, len(data), (3,), generator=draws).tolist():
            data[place] ^= 1 << int(torch.randint(0, 8, (1,), generator=draws))
        path.write_bytes(data)
        try:
            load_all(tmp_path, end.split(".")[1].replace("pt", "torch"), last_norm="post")
        except HsStreamError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ([1, 2], "expected a dict of tensors, found a list"),
        ({"input_ids": [1, 2]}, "expected the tensor input_ids, found list"),
        ({"input_ids": torch.ones(2, 3, 4)}, r"input_ids has shape \[2, 3, 4\]"),
        ({"input_ids": torch.arange(4).to_sparse()}, "holds more than tensors, text and numbers"),
        (
            {"input_ids": torch.zeros(1, dtype=torch.int64).as_strided((1 << 40,), (0,))},
            "claims 8796093022208 bytes",
        ),
        ({"input_ids": {"b": {"c": {"d": {"e": {"f": {}}}}}}}, "nested deeper"),
    ],
)
def test_odd_content_is_refused_in_words(record: Any, text: str, tmp_path: Path) -> None:
    save(record, tmp_path / "data_0.ckpt")
    with pytest.raises(SourceError, match=text):
        load_all(tmp_path, "specforge")


def test_a_gzip_bomb_is_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchfile, "FREE_BYTES", 1 << 20)
    with gzip.open(tmp_path / "data_0.ckpt.gz", "wb") as file:
        for _ in range(16):
            file.write(bytes(1 << 20))
    with pytest.raises(SourceError, match="inflates to more than"):
        load_all(tmp_path, "specforge")


def test_files_of_old_torch_are_read(tmp_path: Path) -> None:
    torch.save(specforge_record(sample(5)), tmp_path / "data_0.ckpt", _use_new_zipfile_serialization=False)
    assert len(load_all(tmp_path)) == 1


@pytest.mark.parametrize(
    "change", ["cut", "offset", "tokens", "missing", "entry", "manifest", "name", "version"]
)
def test_a_deepspec_cache_that_lies_is_refused(change: str, tmp_path: Path) -> None:
    made_by.write_deepspec(tmp_path, samples())
    index, manifest = tmp_path / "samples.idx", json.loads((tmp_path / "manifest.json").read_text())
    entry = list(struct.unpack_from("<QIIQQQQQ", index.read_bytes()))
    if change == "cut":
        shard = tmp_path / "shard-00000.bin"
        shard.write_bytes(shard.read_bytes()[:-5])
    elif change == "missing":
        (tmp_path / "shard-00000.bin").unlink()
    elif change == "entry":
        index.write_bytes(index.read_bytes()[:-1])
    elif change == "manifest":
        manifest["hidden_size"] = "16"
    elif change == "name":
        manifest["shards"][0]["file_name"] = "../../etc/passwd"
    elif change == "version":
        manifest["version"] = 3
    else:
        entry[6 if change == "offset" else 2] = 2**63 if change == "offset" else 2**32 - 1
        index.write_bytes(struct.pack("<QIIQQQQQ", *entry) + index.read_bytes()[56:])
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SampleError):
        load_all(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"format_version": 9}', "\xff"])
def test_a_broken_manifest_is_refused(content: str, tmp_path: Path) -> None:
    made_by.write_nemo(tmp_path, samples())
    (tmp_path / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(SampleError):
        load_all(tmp_path, "nemo")


def test_a_broken_shard_of_nemo_is_one_bad_sample(tmp_path: Path) -> None:
    made_by.write_nemo(tmp_path, samples())
    (tmp_path / "shard-000000.safetensors").write_bytes(b"cut")
    source = open_source(tmp_path, "auto", Options())
    files = list(source.files())
    assert [len(file.items) for file in files] == [1, 1]
    with pytest.raises(SourceError, match="not a readable safetensors file"):
        source.load(files[0], files[0].items[0])


def test_rows_without_bytes_take_no_memory(tmp_path: Path) -> None:
    made_by.write_nemo(tmp_path, samples())
    header = json.dumps(
        {"input_ids": {"dtype": "I64", "shape": [1 << 40, 0], "data_offsets": [0, 0]}}
    ).encode()
    (tmp_path / "shard-000000.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    source = open_source(tmp_path, "nemo", Options())
    first = next(iter(source.files()))
    assert len(first.items) == 1
    with pytest.raises(SourceError):
        source.load(first, first.items[0])


# --- files and keys


def test_files_come_in_natural_order_each_once_despite_loops(tmp_path: Path) -> None:
    for name in ("data_10.ckpt", "data_2.ckpt", "sub/data_1.ckpt", ".hidden.ckpt", "x.txt", "token_freq.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "sub" / "again").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "nowhere.ckpt").symlink_to(tmp_path / "gone")
    (tmp_path / "loop.ckpt").symlink_to(tmp_path / "loop.ckpt")
    found = [path.relative_to(tmp_path).as_posix() for path in walk(tmp_path, (".ckpt", ".pt"))]
    assert found == ["data_2.ckpt", "data_10.ckpt", "sub/data_1.ckpt"]


@pytest.mark.parametrize("end", [".ckpt", ".safetensors"])
def test_names_need_not_be_utf8(end: str, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9" + end.encode())
    if end == ".ckpt":
        save(specforge_record(sample(5)), tmp_path / "data.ckpt").rename(path)
    else:
        made_by.write_plain(tmp_path, [sample(5)])
        (tmp_path / "s0.safetensors").rename(path)
    source = open_source(tmp_path, "auto", Options(last_norm="post"))
    (file,) = source.files()
    assert KEY_PATTERN.fullmatch(file.items[0].key)
    assert file.items[0].origin == f"caf\\xe9{end}"
    assert len(source.load(file, file.items[0]).tensors) == 4


NAMES = st.lists(
    st.binary(min_size=1, max_size=40).filter(lambda b: not set(b) & {0, 47}), min_size=1, max_size=3
)


@given(NAMES, NAMES)
def test_keys_are_allowed_and_differ_where_paths_do(one: list[bytes], other: list[bytes]) -> None:
    root = Path("/src")
    paths = [Path(root, *(os.fsdecode(part) for part in parts)) for parts in (one, other)]
    if any(path.name in ("", "..") or ".." in path.parts for path in paths):
        return
    first, second = (key_of(root, path, (".ckpt",)) for path in paths)
    assert KEY_PATTERN.fullmatch(first)
    same = os.fsencode(paths[0]).removesuffix(b".ckpt") == os.fsencode(paths[1]).removesuffix(b".ckpt")
    assert (first == second) == same


def test_keys_follow_the_path() -> None:
    root = Path("/src")
    keys = {
        "a/b/data_7.ckpt": "a--b--data_7",
        "data_7.ckpt.gz": "data_7",
        "x.y.ckpt": "x_y--",
        "-a.ckpt": "a--",
        "a--b.ckpt": "a--b--",
    }
    for path, key in keys.items():
        found = key_of(root, root / path, (".ckpt", ".ckpt.gz"))
        assert found == key if not key.endswith("--") else found.startswith(key), found
    assert key_of(root, root / "s.bin", (".bin",), 4) == "s--4"
    assert len(key_of(root, root / ("n" * 200), (), 123456)) <= 56


def test_specforge_keys_are_its_numbers(tmp_path: Path) -> None:
    made_by.write_specforge(tmp_path, samples((4,)))
    for place in ("rows_0-2000/data_2500.ckpt", "rank_1/rows_0-2000/data_3.ckpt", "data_07.ckpt"):
        save(specforge_record(sample(4)), tmp_path / place)
    assert sorted(load_all(tmp_path)) == sorted(
        ["data_0", "data_7", "rank_1--rows_0-2000--data_3", "rows_0-2000--data_2500"]
    )
