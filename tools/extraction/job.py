"""One extraction from start to end: plan, check the space, load, capture, write.

Everything cheap that can refuse the run comes before the weights are loaded: sources, tokenizer, layer
ids, and the space the states will need, projected from the tokens of the first window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch

import hsstream as hs
from extraction import capture as captures
from extraction import target
from extraction.batches import PaddedBatch, batches, windows
from extraction.errors import ExtractError
from extraction.progress import Counts, Progress
from extraction.source import SourceFile, list_files
from extraction.space import StoredBytes, check_codec, check_space, state_bytes
from extraction.tokens import Tokenizing, TokenSample, told


@dataclass(frozen=True)
class Job:
    """The settings of a run; the command line of tools/extract.py describes each."""

    sources: list[str]
    out: str
    model: target.ModelSource
    layers: tuple[int, ...] | None = None
    last_norm: Literal["pre", "post"] = "post"
    dtype: str = "bfloat16"
    device: str = "cpu"
    codec: str | dict[str, str] = "fp8"
    compression: str | None = None
    batch_size: int = 8
    batch_tokens: int = 16_384
    window: int = 256
    max_length: int = 2_048
    max_tokens: int | None = None
    loss: str = "assistant"
    text_field: str = "text"
    chat_template: str | None = None
    on_bad: Literal["raise", "skip"] = "raise"
    shard_bytes: int = 1 << 30
    name: str = "hs"
    part: tuple[int, int] = (0, 1)
    top_k: int = 64


@dataclass
class Run:
    """The state of a running job: what was counted, and what was dropped and why."""

    job: Job
    progress: Progress
    counts: Counts
    dropped: Counter[str]


def run_job(job: Job, progress: Progress) -> Run:
    """Extract everything that the data set at `job.out` does not hold yet."""
    files = list_files(job.sources)
    tokenizer = _tokenizer(job)
    layers, hidden = _layers(job)
    tokenizing = Tokenizing(
        tokenizer, job.max_length, job.loss, job.on_bad, job.text_field, report=progress.note
    )
    run = Run(job, progress, Counts(), tokenizing.dropped)
    stream = windows(_part(job, _limited(job, tokenizing.samples(files))), job.window)
    check_codec(job.codec, job.last_norm)
    first = next(stream, None)
    if first is None:
        raise ExtractError(_nothing(job, tokenizing, len(files)))
    project = _Projection(files, tokenizing, job)
    run.counts.total_tokens = project.total_tokens()
    check_space(job.out, run.counts.total_tokens, len(layers) + 1, hidden, job.codec, job.dtype)
    captured = captures.Capture(job.model.load(job.dtype, job.device), layers, job.last_norm)
    info = target.model_info(job.model, tokenizer, captured.model, captured)
    with _writer(job, info, _teacher(job, captured.model)) as writer:
        stored = StoredBytes(job.out, job.name)
        run.counts.restart()
        for window in chain([first], stream):
            run.counts.total_tokens = project.total_tokens()
            _extract_window(run, window, captured, writer, stored, _pad_id(tokenizer))
    run.counts.stored_bytes, run.counts.complete = stored.since_start(), True
    run.dropped["nonfinite"] = len(writer.stats().skipped)
    return run


def _nothing(job: Job, tokenizing: Tokenizing, files: int) -> str:
    """Why there is no sample."""
    read = f"{tokenizing.documents:,} documents of {files:,} files"
    if tokenizing.read_tokens:
        return f"nothing to extract: --part {job.part[0]}/{job.part[1]} gets none of the samples of {read}"
    return f"nothing to extract from {read}: {'; '.join(told(tokenizing.dropped)) or 'there is no document'}"


def _tokenizer(job: Job) -> Any:
    tokenizer = job.model.tokenizer()
    if job.chat_template is not None:
        tokenizer.chat_template = job.chat_template
    return tokenizer


def _layers(job: Job) -> tuple[tuple[int, ...], int]:
    """Layer ids and hidden size, from the configuration alone."""
    config = job.model.config()
    count = captures.num_layers(config)
    wanted = captures.default_layers(count) if job.layers is None else job.layers
    layers = captures.check_layers(wanted, count)
    return layers, int(config.get_text_config(decoder=True).hidden_size)


def _pad_id(tokenizer: Any) -> int:
    return next((n for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None), 0)


def _limited(job: Job, samples: Iterable[TokenSample]) -> Iterator[TokenSample]:
    """Whole samples until `max_tokens` is reached; a resumed run stops at the same one."""
    taken = 0
    for sample in samples:
        if job.max_tokens is not None and taken >= job.max_tokens:
            return
        taken += len(sample)
        yield sample


def _part(job: Job, samples: Iterable[TokenSample]) -> Iterator[TokenSample]:
    index, count = job.part
    return (sample for number, sample in enumerate(samples) if number % count == index)


@dataclass(frozen=True)
class _Projection:
    """The tokens to expect of this part: exact once the source is read, else by bytes."""

    files: list[SourceFile]
    tokenizing: Tokenizing
    job: Job

    def total_tokens(self) -> int:
        bytes_in_all = sum(file.size for file in self.files)
        per_byte = self.tokenizing.read_tokens / max(self.tokenizing.read_bytes, 1)
        total = max(int(bytes_in_all * per_byte), 1)
        if self.job.max_tokens is not None:
            total = min(total, self.job.max_tokens)
        return max(total // self.job.part[1], 1)


def _teacher(job: Job, model: Any) -> hs.TopKTeacher | None:
    """The model's own head, for the preset that keeps logits in place of the last state."""
    if job.codec != "sparse":
        return None
    head = model.get_output_embeddings()
    if head is None:
        raise ExtractError("--codec sparse: this model has no output head")
    weight = head.weight.detach()
    return hs.TopKTeacher(weight, min(job.top_k, len(weight)))


def _writer(job: Job, info: hs.ModelInfo, teacher: hs.TopKTeacher | None) -> hs.ShardWriter:
    try:
        return hs.ShardWriter(
            job.out,
            codec=job.codec,
            compression=job.compression,
            model=info,
            shard_bytes=job.shard_bytes,
            name=job.name,
            commit=job.part[1] == 1,
            on_nonfinite=job.on_bad,
            teacher=teacher,
        )
    except ValueError as error:
        if isinstance(error, hs.HsStreamError):
            raise
        raise ExtractError(str(error)) from error


def _extract_window(
    run: Run,
    window: list[TokenSample],
    captured: captures.Capture,
    writer: hs.ShardWriter,
    stored: StoredBytes,
    pad_id: int,
) -> None:
    fresh = [sample for sample in window if sample.key not in writer]
    run.counts.known += len(window) - len(fresh)
    run.counts.known_tokens += sum(map(len, window)) - sum(map(len, fresh))
    for batch in batches(fresh, run.job.batch_size, run.job.batch_tokens, pad_id):
        aux_BTLH, last_BTH = _forward(captured, batch)
        _write_batch(writer, batch, aux_BTLH, last_BTH)
        tokens = sum(map(len, batch.samples))
        run.counts.samples += len(batch.samples)
        run.counts.tokens += tokens
        run.counts.plain_bytes += state_bytes(tokens, aux_BTLH.shape[2] + 1, aux_BTLH.shape[3])
        run.counts.stored_bytes = stored.since_start()
        run.progress.show(run.counts)


def _forward(captured: captures.Capture, batch: PaddedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    device = captured.model.get_input_embeddings().weight.device
    try:
        return captured(batch.ids.to(device), batch.mask.to(device))
    except torch.OutOfMemoryError as error:
        shape = " x ".join(map(str, batch.ids.shape))
        line = f"out of memory on a batch of {shape}: lower --batch-size or --batch-tokens"
        raise ExtractError(line) from error


def _write_batch(
    writer: hs.ShardWriter, batch: PaddedBatch, aux_BTLH: torch.Tensor, last_BTH: torch.Tensor
) -> None:
    """Each row without its padding, in the batch's order."""
    for row, sample in enumerate(batch.samples):
        tensors = {
            "input_ids": torch.from_numpy(sample.ids),
            "loss_mask": torch.from_numpy(sample.mask),
            "aux_hidden_states": aux_BTLH[row, : len(sample)],
            "last_hidden_state": last_BTH[row, : len(sample)],
        }
        writer.write(sample.key, tensors, meta=sample.meta)
