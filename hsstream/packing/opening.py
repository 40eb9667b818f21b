"""Both ends of a run, opened: the source, and the writer of the data set.

In: a `Job`. Out: a `Source`; a `ShardWriter`. Refused: a source in which nothing is found, an unknown codec,
a teacher that has no states to judge by (SampleError); what the writer refuses.
"""

from __future__ import annotations

import math
import threading
import time

from hsstream.errors import SampleError
from hsstream.packing.job import Job
from hsstream.presets import check_codec
from hsstream.sample import ModelInfo
from hsstream.sources.base import Source
from hsstream.sources.detect import EmptySourceError, UnreadableSourceError, open_source
from hsstream.writer import ShardWriter


def check_job(job: Job) -> None:
    """Refuse what is wrong whatever the files hold."""
    check_codec(job.codec)
    if job.teacher is None and job.codec == "sparse":
        raise SampleError("codec sparse keeps the largest logits: give --teacher, the model's folder")


def open_job_source(job: Job, stop: threading.Event) -> Source | None:
    """The source; a program that is followed may not have finished its first file yet."""
    began = time.monotonic()
    while True:
        try:
            return open_source(job.source, job.format, job.options)
        except (EmptySourceError, UnreadableSourceError):
            if job.follow is None or time.monotonic() - began >= (job.follow.idle_exit or math.inf):
                raise
        if stop.wait(job.follow.poll):
            return None


def open_writer(job: Job, model: ModelInfo | None) -> ShardWriter:
    """The writer at the root, which continues what is there."""
    teacher = job.teacher
    if teacher is not None and model is not None and model.last_hidden_norm != "post":
        raise SampleError("a teacher needs last hidden states after the final norm: give --to-post-norm too")
    return ShardWriter(
        job.root,
        codec=job.codec,
        compression=job.compression,
        model=model,
        shard_bytes=job.shard_bytes,
        name=job.name,
        threads=max(1, job.workers),
        storage_options=job.storage_options,
        commit=job.commit,
        teacher=teacher,
    )
