"""Which source files may go.

In: which samples came from which file, and the shards that a writer has sealed. Out: source files,
deleted; never one with a sample that is not in a sealed shard whose every hash has been read back. A file
with a bad sample stays, one that has changed since it was read, one that holds what the data set does not,
and one that is reached through a link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hsstream.encoding import seal
from hsstream.errors import CorruptDataError, StorageError
from hsstream.packing.feed import Mark, mark_of
from hsstream.packing.known import SealedSample
from hsstream.sources.base import SourceFile
from hsstream.sources.files import is_own
from hsstream.storage import Store
from hsstream.verify import verify
from hsstream.writer import Prepared, ShardWriter


@dataclass
class _Entry:
    """One source file: its state when it was first read, samples not yet safe, whether it must stay."""

    path: Path
    mark: Mark | None
    left: int
    keep: bool = False
    held: set[str] = field(default_factory=set)


class Ledger:
    """Deletes source files as their samples become safe; `settle` after every few appended samples.

    root: of the source. active: False to delete nothing, and remember nothing. note(path, reason): a file
    that stays although all its samples are sealed. gone(path): it was deleted.
    """

    def __init__(
        self,
        writer: ShardWriter,
        store: Store,
        root: Path,
        active: bool,
        note: Callable[[Path, str], None],
        gone: Callable[[Path], None],
    ) -> None:
        self._writer, self._store, self._root, self._active = writer, store, root, active
        self._note, self._gone = note, gone
        self._files: dict[Path, _Entry] = {}
        self._waiting: dict[str, _Entry] = {}
        self._settled = 0
        self._verified: set[str] = set()
        self.deleted = 0

    def open(self, file: SourceFile) -> None:
        """A file is about to be read."""
        if self._active:
            self._files[file.path] = _Entry(file.path, mark_of(file.path), len(file.items))

    def appended(self, file: SourceFile, key: str) -> None:
        """A sample was handed to the writer."""
        if self._active:
            self._waiting[key] = self._files[file.path]

    def held(self, file: SourceFile, names: Iterable[str]) -> None:
        """The file holds what the data set does not: it stays, and is named once its samples are done."""
        if self._active:
            self._files[file.path].held.update(names)

    def keep(self, file: SourceFile) -> None:
        """A sample of this file is bad: the file stays."""
        if self._active:
            self._files[file.path].keep = True
            self._count(self._files[file.path])

    def forget(self, file: SourceFile) -> None:
        """The file was not complete after all, and will be read again."""
        self._files.pop(file.path, None)

    def known(self, file: SourceFile, prepared: Prepared, sealed: SealedSample) -> None:
        """A sample that an earlier run has sealed; `prepared` from the file as it is now.

        The file may go only if that is what is sealed: the two headers hold every hash.
        """
        if seal(prepared.plain).header.xxh3 != sealed.header_xxh3:
            self._note(file.path, "what is sealed under its key was made otherwise: it stays")
            self.keep(file)
            return
        self._verify(sealed.shard)
        self._count(self._files[file.path])

    def settle(self) -> None:
        """Look for newly sealed shards, read them back, and delete what they make safe."""
        sealed = self._writer.sealed()
        while self._active and self._settled < len(sealed):
            name = list(sealed)[self._settled]
            self._verify(name)
            self._settled += 1
            for key in sealed[name].table.keys:
                entry = self._waiting.pop(key, None)
                if entry is not None:
                    self._count(entry)

    def _count(self, entry: _Entry) -> None:
        entry.left -= 1
        if entry.left > 0:
            return
        self._files.pop(entry.path, None)
        if entry.keep:
            return
        if entry.held:
            names = sorted(entry.held)
            self._note(
                entry.path,
                f"it also holds {', '.join(names)}, which the data set does not: it stays "
                f"(--drop {' '.join(names)} lets it go)",
            )
            return
        self._delete(entry)

    def _delete(self, entry: _Entry) -> None:
        if not is_own(self._root, entry.path):
            self._note(entry.path, "it is reached through a link: nothing is deleted there")
            return
        if entry.mark is None or mark_of(entry.path) != entry.mark:
            self._note(entry.path, "the file has changed since it was read: it stays")
            return
        try:
            entry.path.unlink()
        except OSError as error:
            raise StorageError(f"{entry.path}: cannot be deleted: {error.strerror or error}") from error
        self.deleted += 1
        self._gone(entry.path)

    def _verify(self, shard: str) -> None:
        """Read a shard back once, and check everything in it."""
        if shard in self._verified:
            return
        report = verify(self._store, workers=1, shards=[shard])
        if not report.ok:
            raise CorruptDataError(
                f"{shard} does not read back as it was written: {report.findings[0].message}; no source file "
                "of its samples was deleted"
            )
        self._verified.add(shard)
