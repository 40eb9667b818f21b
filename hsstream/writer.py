"""ShardWriter: samples in, sealed shards and a committed data set out.

In: a key, token-first tensors, an optional attention mask, metadata. Out: shards under one root and,
on `close`, the consolidated index and manifest.json. Refused with a typed, located error and without
any effect on what was written before: samples the format cannot hold (SampleError), an existing data
set with another schema or model (SchemaMismatchError), a place that cannot be written (StorageError).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from weakref import finalize

from hsstream.appender import Appender, Sealed, ShardLimits
from hsstream.encoding import PlainRecord, PlainTensor, encode
from hsstream.errors import ForkError, HsStreamError, NonFiniteError, SampleError, located
from hsstream.facts import FactsOverlay
from hsstream.header import pack, unpack
from hsstream.lifetime import Lifetime
from hsstream.manifest import commit_all, existing_shards, next_number
from hsstream.presets import check_codec
from hsstream.runs import rows_to_store
from hsstream.sample import ModelInfo, Sample, check_key, prepare_sample
from hsstream.schema import DatasetInfo, schema_of
from hsstream.shard import ShardIndex
from hsstream.space import SpaceGuard
from hsstream.storage import open_store
from hsstream.table import SampleFacts, facts_of
from hsstream.teacher import TopKTeacher
from hsstream.version import WRITER

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
QUEUE_BYTES = 256 << 20


@dataclass
class WriterStats:
    """What a writer has done. nbytes: of sealed shards; skipped: (key, reason) of refused samples."""

    samples: int = 0
    tokens: int = 0
    nbytes: int = 0
    shards: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """An encoded sample on its way from `prepare` to `append`."""

    plain: PlainRecord
    facts: SampleFacts
    info: DatasetInfo


class ShardWriter:
    """Writes samples to shards of a data set, in the order of `write()`.

    End it with `close()`, or use `with`. Threads may share a writer; a forked child opens one of its own.

    Args:
        root: directory or URL of the data set; created when missing, continued when it exists.
        codec: a preset or codec for `aux_hidden_states` and `last_hidden_state`, or a map by tensor name.
        compression: `lz4`, `zstd` or `none` for all tensors, a map by name, or None: the codec's own.
        model: facts about the captured model, the same for the whole data set.
        shard_bytes: a shard is sealed before it would grow past this size.
        name: shards are called NAME-000000.tar, ...; several writers of one root need different names.
        threads: threads that compress and hash.
        storage_options: for the store of `root`.
        commit: write index and manifest on close; False leaves that to `hsstream index ROOT`.
        expected_tokens: refuse to start when that many tokens cannot fit, and warn (logger `hsstream`, once
            a shard) when those to come will not.
        on_nonfinite: `raise` on NaN or Inf, or `skip` the sample and count it in `stats()`.
        last_rows: `all`, or `supervised` to keep only the rows of `last_hidden_state` that a loss over
            `ttt_length` unrolled steps can reach.
        shard_samples: a shard is sealed at this many samples.
        teacher: store its largest logits in place of `last_hidden_state` (codec `sparse` needs one, or
            samples that bring `target_topk_*` themselves).

    Raises:
        StorageError: root not writable, or another writer of this name is open.
        SchemaMismatchError: the data set there was captured from another model, or is stored by other codecs.
        SampleError: `codec` names neither a preset nor a codec.
    """

    def __init__(
        self,
        root: str | Path,
        codec: str | Mapping[str, str] = "fp8",
        compression: str | Mapping[str, str] | None = None,
        model: ModelInfo | None = None,
        shard_bytes: int = 1 << 30,
        name: str = "hs",
        threads: int = 2,
        storage_options: dict[str, Any] | None = None,
        commit: bool = True,
        expected_tokens: int | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        last_rows: Literal["all", "supervised"] = "all",
        ttt_length: int = 7,
        shard_samples: int = 100_000,
        teacher: TopKTeacher | None = None,
    ) -> None:
        _check_arguments(
            name,
            {
                "on_nonfinite": (on_nonfinite, ("raise", "skip")),
                "last_rows": (last_rows, ("all", "supervised")),
            },
            {
                "threads": threads,
                "shard_bytes": shard_bytes,
                "shard_samples": shard_samples,
                "ttt_length": ttt_length,
            },
        )
        check_codec(codec)
        self._codec, self._compression, self._teacher = codec, compression, teacher
        self._model = _plain_model(_with_draft_vocabulary(model, teacher))
        self._name, self._threads, self._commit = name, threads, commit
        self._limits = ShardLimits(shard_bytes, shard_samples)
        self._on_nonfinite = on_nonfinite
        self._last_rows, self._ttt_length = last_rows, ttt_length if last_rows != "all" else None
        self._skipped: list[tuple[str, str]] = []
        self._samples = self._tokens = 0
        self._store = open_store(root, storage_options)
        self._store.require_writable()
        self._space = SpaceGuard(self._store, expected_tokens, shard_bytes)
        with ExitStack() as stack:
            stack.enter_context(self._store.lock(name))
            self._store.discard_stale(f"{name}-")
            overlay = FactsOverlay.read(self._store)
            self._known, self._info = existing_shards(self._store, overlay)
            if self._info is not None:
                if self._model is not None:
                    self._model = replace(self._model, **overlay.facts)
                    (self._info.model or ModelInfo()).require_same(self._model)
                self._info.schema.require_codecs(codec, self._store.url)
            self._keys = {key for index in self._known.values() for key in index.table.keys}
            self._next_number = next_number(self._known, name)
            self._life = Lifetime(f"the writer {name!r} of {self._store.url}", stack.pop_all())
        finalize(self, self._life.drop).atexit = False

    def write(
        self,
        key: str,
        tensors: Mapping[str, Any],
        attention_mask: Any = None,
        meta: Mapping[str, Any] | None = None,
        stored_rows: Mapping[str, Any] | None = None,
    ) -> None:
        """Validate and encode one sample; on return the inputs may be reused.

        Several threads may call it at once; each one's samples stay in their order.

        Args:
            key: 1 to 56 characters of A-Z a-z 0-9 _ -, unique in the data set.
            tensors: name -> tensor or array with the token axis [S] first; `input_ids` [S] integers,
                `loss_mask` [S] 0/1, `aux_hidden_states` [S, L, H], `last_hidden_state` [S, H], others
                of any trailing shape.
            attention_mask: [S], non-zero means real; padding on either side is dropped, never stored.
            meta: small msgpack-able metadata, given back with the sample.
            stored_rows: of a sample that was read from another data set, its `Sample.stored_rows`.

        Raises:
            SampleError: the format cannot hold this sample, or a loss would use a row of
                `last_hidden_state` that was never captured or stored; nothing of it was written.
            StorageError: an earlier sample could not be written.
            ForkError: this is a forked child of the process that opened the writer.
        """
        try:
            prepared = self.prepare(key, tensors, attention_mask, meta, None, stored_rows)
        except NonFiniteError as error:
            if self._on_nonfinite == "raise":
                raise
            self._skipped.append((key, str(error)))
            return
        self.append(prepared)

    def prepare(
        self,
        key: str,
        tensors: Mapping[str, Any],
        attention_mask: Any = None,
        meta: Mapping[str, Any] | None = None,
        ready: Mapping[str, PlainTensor] | None = None,
        stored_rows: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """The first half of `write`: validate and encode. NaN and Inf are refused whatever `on_nonfinite`.

        Threads that prepare before the first sample has been appended each work out the schema. ready:
        tensors that are encoded already, as in `encoding.encode`.
        """
        self._life.check()
        check_key(key)
        with located(key=key):
            sample = prepare_sample(key, self._taught(tensors), attention_mask, meta, stored_rows)
            return self._encode(sample, ready)

    def append(self, prepared: Prepared, in_step: bool = False) -> None:
        """The second half of `write`: queue a prepared sample behind those appended before.

        in_step: small samples are compressed and written while the caller waits, several at once.
        """
        plain = prepared.plain
        with self._life.writing():
            with located(key=plain.key):
                if plain.key in self._keys:
                    raise SampleError("this key was already written: test `key in writer` before writing")
                appender = self._started(prepared)
                appender.put(plain, prepared.facts, in_step)
            self._keys.add(plain.key)
            self._samples += 1
            self._tokens += plain.tokens
            self._space.sealed(appender.sealed.tokens, appender.sealed.nbytes)

    def seal(self) -> None:
        """Seal what was written, however small the shard; returns when it is done."""
        with self._life.writing():
            if self._life.appender is not None:
                self._life.appender.seal()

    def commit(self) -> None:
        """Make what is sealed so far the data set's, for readers that come while this writer goes on.

        Raises:
            StorageError: index or manifest could not be written; what is sealed is intact.
        """
        self._life.check()
        if known := {**self._known, **self.sealed()}:
            commit_all(self._store, known)

    @property
    def info(self) -> DatasetInfo | None:
        """The data set block: of the data set at the root, or fixed by the first sample; None before."""
        return self._info

    def found(self) -> Mapping[str, ShardIndex]:
        """The shards that were at the root when the writer was opened."""
        return self._known

    def sealed(self) -> Mapping[str, ShardIndex]:
        """The shards this writer has sealed so far, in order; grows while it writes."""
        return self._life.appender.sealed.shards if self._life.appender else {}

    def _taught(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._teacher is not None:
            return self._teacher.apply(tensors)
        if self._codec == "sparse" and "target_topk_ids" not in tensors:
            raise SampleError(
                'codec "sparse" keeps the largest logits: give the writer teacher=TopKTeacher(lm_head), '
                "or the sample target_topk_ids, target_topk_logits and target_logsumexp"
            )
        return tensors

    def __contains__(self, key: object) -> bool:
        """Whether this key is sealed by an earlier run, or was written by this one."""
        return key in self._keys

    def stats(self) -> WriterStats:
        """Samples and tokens accepted by this writer; bytes and shards it has sealed."""
        sealed = self._life.appender.sealed if self._life.appender else Sealed()
        return WriterStats(
            self._samples, self._tokens, sealed.nbytes, len(sealed.shards), list(self._skipped)
        )

    def close(self) -> None:
        """Seal what was written and, with `commit`, make it the data set's; further calls do nothing.

        Without it, what was written is sealed all the same when the writer is collected or the interpreter
        ends, but not committed, and a ResourceWarning and a line of the logger `hsstream` say so. A process
        that is killed, or ends by `os._exit`, seals nothing more.

        Raises:
            StorageError: something could not be written or published; what was sealed is intact.
            ForkError: this is a forked child of the process that opened the writer.
        """
        self._finish(self._commit)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            # The caller's exception must not be replaced, and a broken-off run is not committed.
            self._finish(commit=False)
        except ForkError:
            pass  # a child leaves its parent's `with`: nothing here is its own
        except HsStreamError as failure:
            if failure is not error:
                warnings.warn(f"while leaving the writer: {failure}", RuntimeWarning, stacklevel=2)

    def _finish(self, commit: bool) -> None:
        with self._life.closing() as first:
            if not first:
                return
            if self._life.appender is not None:
                self._life.appender.finish()
            known = {**self._known, **self.sealed()}
            if commit and known:
                commit_all(self._store, known)

    def _encode(self, sample: Sample, ready: Mapping[str, PlainTensor] | None) -> Prepared:
        info = self._info_for(sample)
        info.check_ids(sample)
        plain = encode(sample, info.schema, rows_to_store(sample, info), ready)
        return Prepared(plain, facts_of(sample), info)

    def _info_for(self, sample: Sample) -> DatasetInfo:
        """The data set block: fixed by the first sample, which must agree with what is at the root."""
        if self._life.appender is not None and self._info is not None:
            self._info.schema.check_sample(sample)
            return self._info
        schema = schema_of(sample, self._codec, self._compression)
        if self._info is None:
            schema.check_facts(self._model)
            return DatasetInfo(schema, self._model, self._last_rows, self._ttt_length)
        model = self._model or self._info.model
        self._info.require_same(DatasetInfo(schema, model, self._last_rows, self._ttt_length))
        return self._info

    def _started(self, first: Prepared) -> Appender:
        if self._life.appender is None:
            self._space.begin(first.plain)
            self._info = info = first.info
            # Nothing here may refer to the writer, or a forgotten one would stay alive with its threads.
            name, begin = self._name, self._next_number
            names = (f"{name}-{number:06d}.tar" for number in count(begin))
            self._life.appender = Appender(
                self._store, info, names, self._limits, WRITER, self._threads, QUEUE_BYTES
            )
        elif self._info is not None and self._info is not first.info:
            self._info.require_same(first.info)
        return self._life.appender


def _check_arguments(
    name: str, choices: Mapping[str, tuple[str, tuple[str, ...]]], counts: Mapping[str, int]
) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"name must be 1 to 64 characters of A-Z a-z 0-9 _ -, got {name!r}")
    for what, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{what} must be one of {', '.join(allowed)}, got {value!r}")
    for what, number in counts.items():
        if number < 1:
            raise ValueError(f"{what} must be at least 1, got {number}")


def _with_draft_vocabulary(model: ModelInfo | None, teacher: TopKTeacher | None) -> ModelInfo | None:
    if teacher is None:
        return model
    size, rows = model.vocab_size if model else None, teacher.lm_head.shape[0]
    if size is not None and size > rows:
        raise SampleError(f"the model has a vocabulary of {size}, the teacher's lm_head has {rows} rows")
    if teacher.draft_vocab_hash is None:
        return model
    return replace(model or ModelInfo(), draft_vocab_hash=teacher.draft_vocab_hash)


def _plain_model(model: ModelInfo | None) -> ModelInfo | None:
    """Model facts as a reader will see them: tuples become lists, what msgpack cannot hold is refused."""
    if model is None:
        return None
    try:
        # In a map of a map, where an index holds them: the depth of nesting counts from its top.
        index = unpack(pack({"dataset": {"model": model.to_dict()}}), "an index with these model facts")
        return ModelInfo.from_dict(index["dataset"]["model"])
    except (TypeError, ValueError, OverflowError) as error:
        raise SampleError(f"model facts must be plain data: {error}") from None
