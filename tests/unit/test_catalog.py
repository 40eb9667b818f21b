"""Several roots as one list of samples: numbering, what is asked of each, and what does not fit together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import MODEL, exact, write_exact

import hsstream as hs
from hsstream.batch import choose_columns
from hsstream.catalog import SHARED_FACTS, open_catalog


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Roots of 3, 1 and 4 samples in 2, 1 and 2 shards."""
    roots = [tmp_path / name for name in "abc"]
    for seed, (root, lengths) in enumerate(zip(roots, [[5, 6, 7], [8], [1, 2, 3, 4]], strict=True)):
        write_exact(root, lengths, prefix=root.name, seed=seed, shard_samples=2)
    return roots


def test_samples_are_numbered_through_all_roots(three: list[Path]) -> None:
    catalog = open_catalog(three, None)
    assert catalog.lengths.tolist() == [5, 6, 7, 8, 1, 2, 3, 4]
    assert catalog.shards.tolist() == [0, 0, 1, 2, 3, 3, 4, 4]
    assert (catalog.shard_count, catalog.counts) == (5, [3, 1, 4])
    assert catalog.keys == ["a0000", "a0001", "a0002", "b0000", "c0000", "c0001", "c0002", "c0003"]
    supervised = [
        int(exact(tokens, 100_003 * 2 + n)["loss_mask"].sum()) for n, tokens in enumerate([1, 2, 3, 4])
    ]
    assert catalog.supervised.tolist()[4:] == supervised
    for sample, (root, number) in enumerate([("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1)]):
        source, found = catalog.source_of(sample)
        assert (Path(str(source.root)).name, found) == (root, number)


def test_a_request_names_the_shard_and_members(three: list[Path]) -> None:
    catalog = open_catalog(three, None)
    columns = choose_columns(
        catalog.first.index.info.schema, ["aux_hidden_states"], [1], torch.bfloat16, False
    )
    request = catalog.request(7, 0, 4, columns)
    assert (request.shard, request.sample, request.whole) == ("hs-000001.tar", 3, True)
    assert request.store is catalog.sources[2].store
    first = catalog.first.index.info.schema.first_member["aux_hidden_states"]
    assert request.members == [first + 1]
    assert not catalog.request(7, 1, 4, columns).whole
    assert not catalog.request(7, 0, 3, columns).whole


@pytest.mark.parametrize("form", [str, Path])
def test_one_root_needs_no_list(three: list[Path], form: Any) -> None:
    assert open_catalog(form(three[0]), None).lengths.tolist() == [5, 6, 7]


def test_roots_may_have_weights(three: list[Path]) -> None:
    catalog = open_catalog([three[0], (three[1], 0.25), (str(three[2]), 3)], None)
    assert [source.weight for source in catalog.sources] == [1.0, 0.25, 3]


def test_shards_may_be_named(three: list[Path]) -> None:
    """Without their manifest, which may say otherwise."""
    catalog = open_catalog(str(three[2] / "hs-{000000..000001}.tar"), None)
    assert catalog.lengths.tolist() == [1, 2, 3, 4]
    assert open_catalog(str(three[2] / "hs-000001.tar"), None).lengths.tolist() == [3, 4]
    assert open_catalog([str(three[2] / "hs-{000001,000000}.tar")], None).lengths.tolist() == [3, 4, 1, 2]


def test_an_earlier_index_shows_the_samples_it_was_made_of(three: list[Path]) -> None:
    digests = open_catalog(three, None).digests()
    write_exact(three[1], [9, 9], prefix="new")
    assert open_catalog(three, None).counts == [3, 3, 4]
    assert open_catalog(three, None, digests).counts == [3, 1, 4]
    with pytest.raises(hs.SampleError, match="2 indexes for 3 roots"):
        open_catalog(three, None, digests[:2])


def test_no_root_is_refused() -> None:
    with pytest.raises(hs.SampleError, match="no root given"):
        open_catalog([], None)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"hidden": 8}, r"aux_hidden_states.trailing is \(2, 16\) against \(2, 8\)"),
        ({"layers": 3}, "aux_hidden_states.trailing"),
        ({"dtype": torch.float16}, "aux_hidden_states.dtype is torch.bfloat16 against torch.float16"),
    ],
)
def test_roots_of_other_shapes_are_refused_with_the_field(
    tmp_path: Path, shape: dict[str, Any], message: str
) -> None:
    write_exact(tmp_path / "a", [5])
    write_exact(tmp_path / "b", [5], shape=shape)
    with pytest.raises(hs.SchemaMismatchError, match=f"b cannot be read together with .*a: {message}"):
        open_catalog([tmp_path / "a", tmp_path / "b"], None)


def test_roots_with_other_tensors_are_refused_with_their_names(tmp_path: Path) -> None:
    write_exact(tmp_path / "a", [5])
    with hs.ShardWriter(tmp_path / "b") as writer:
        writer.write("k", {"input_ids": torch.arange(4)})
    with pytest.raises(hs.SchemaMismatchError, match=r"tensors input_ids, loss_mask, .* against input_ids"):
        open_catalog([tmp_path / "a", tmp_path / "b"], None)


@pytest.mark.parametrize("field", SHARED_FACTS)
def test_roots_of_another_model_are_refused_with_the_field(tmp_path: Path, field: str) -> None:
    other: dict[str, Any] = {
        "name": "other",
        "hidden_size": None,
        "vocab_size": 2000,
        "aux_layer_ids": (1, 2),
        "layer_id_convention": "layer_output_0based",
        "last_hidden_norm": "pre",
        "aux_hidden_norm": ("pre", "post"),
    }
    write_exact(tmp_path / "a", [5], model=MODEL)
    write_exact(tmp_path / "b", [5], model=replace(MODEL, **{field: other[field]}))
    with pytest.raises(hs.SchemaMismatchError, match=f"model.{field} is .* against"):
        open_catalog([tmp_path / "a", tmp_path / "b"], None)


def test_what_does_not_matter_for_training_may_differ(tmp_path: Path) -> None:
    write_exact(tmp_path / "a", [5], model=replace(MODEL, engine="x", versions={"torch": "1"}), codec="fp8")
    write_exact(tmp_path / "b", [5], model=replace(MODEL, revision="r", tokenizer="t"), codec="planes")
    assert open_catalog([tmp_path / "a", tmp_path / "b"], None).counts == [1, 1]
