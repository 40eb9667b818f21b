"""One audit from start to end.

In: a root, a model's folder, `Settings`. Out: a `Report`. Refused: what `choose`, `lens` and the reader
refuse. What cannot be checked (states where the model cannot be run, masks without a template) becomes a
note.

Two stages judge the states. The head alone reads many samples (`fits`); the model itself is run on some,
those that the head suspects among them, and what it says of a sample counts more: only it knows which
tokens cannot be predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hsstream.audit import choose, masks, probe, template
from hsstream.audit.fits import Fits
from hsstream.audit.lens import Lens
from hsstream.audit.report import Finding, Report
from hsstream.audit.states import Comparison, Gathered
from hsstream.audit.verdict import verdict
from hsstream.errors import SampleError
from hsstream.reader import ShardReader
from hsstream.sample import HIDDEN_STATES, ModelInfo

#: Samples that the model is run on unless said otherwise: as many as have so many tokens together, and at
#: least MIN_RUN; and how many more that the head suspects.
RUN, RUN_TOKENS, MIN_RUN, SUSPECTS = 32, 16_384, 4, 8


@dataclass(frozen=True)
class Settings:
    """samples: how many are looked at, evenly spread; 0: all. tokens: rows of each that the head reads. run:
    samples that the model itself is run on; 0: none; None: RUN of them, fewer where they are long. device:
    where the head and the model compute."""

    samples: int = 32
    tokens: int = 256
    run: int | None = None
    device: str = "cpu"


def audit(
    root: str,
    model: str,
    settings: Settings | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    load: Callable[[str, torch.dtype, str], probe.Model] = probe.Model,
) -> Report:
    """Check a capture against its model.

    load: makes what is run of the model's folder, a dtype and a device.

    Raises:
        SampleError: nothing to audit, or a model that does not fit or cannot be read.
        StorageError, FormatError: the data set cannot be read.
    """
    return _Audit(root, model, settings or Settings(), storage_options, load).report(progress)


class _Audit:
    def __init__(
        self,
        root: str,
        model: str,
        settings: Settings,
        storage_options: dict[str, Any] | None,
        load: Callable[[str, torch.dtype, str], probe.Model],
    ) -> None:
        self._settings, self._model, self._load = settings, model, load
        self._reader = ShardReader(root, storage_options)
        choose.check(self._reader)
        self._info = self._reader.index.info
        self._facts = self._info.model or ModelInfo()
        self._lens = Lens(model, settings.device)
        for name in HIDDEN_STATES:
            if name in self._info.schema.by_name:
                self._lens.check(name, self._info.schema.by_name[name].trailing[-1])
        self._report = Report(root, model)

    def report(self, progress: Callable[[int, int], None] | None) -> Report:
        numbers = choose.numbers(len(self._reader), self._settings.samples)
        self._report.samples = len(numbers)
        self._progress = progress or (lambda _done, _all: None)
        fits = Fits(self._reader, self._lens, self._report, self._settings.tokens)
        by_head: dict[str, Finding] = {}
        if choose.LAST in self._info.schema.by_name:
            by_head = fits.run(numbers, lambda done: self._progress(done, 2 * len(numbers)))
        gathered = self._compare(numbers, by_head)
        self._zeros(numbers, gathered)
        if gathered is None:
            self._report.findings += [*fits.findings, *_grouped(by_head)]
            self._report.notes = [*self._report.notes, *fits.notes]
        else:
            self._combine(fits, by_head, gathered)
        self._masks()
        return self._report

    def _zeros(self, numbers: Sequence[int], gathered: Gathered | None) -> None:
        """Rows without values, of the samples that were looked at and of all rows that were compared."""
        by_state: dict[str, list[str]] = {}
        compared = {} if gathered is None else gathered.zeros
        for number in numbers:
            key = self._reader.index.table.key(number)
            names = compared.get(key)
            if names is None:
                names = choose.zero_states(
                    self._reader.read(number, slice(0, self._settings.tokens)), self._info
                )
            for name in names:
                by_state.setdefault(name, []).append(key)
        for name, keys in by_state.items():
            message = f"{len(keys)} samples have rows of {name} that are all zero"
            self._report.findings.append(Finding("zeros", message, tuple(keys)))

    # -- the model itself ------------------------------------------------------------------------

    def _compare(self, numbers: Sequence[int], by_head: Mapping[str, Finding]) -> Gathered | None:
        """What the model says, or None and a note of why nothing."""
        reason = "the model was not run"
        if self._settings.run != 0:
            try:
                return self._run(numbers, by_head)
            except SampleError as error:
                reason = str(error)
        if choose.LAST not in self._info.schema.by_name:
            raise SampleError(
                f"without {choose.LAST} nothing can be audited unless the model is run: {reason}"
            )
        self._report.notes.append(
            f"layers not checked, nor sizes, noise and what the head does not show: {reason}"
        )
        return None

    def _run(self, numbers: Sequence[int], by_head: Mapping[str, Finding]) -> Gathered:
        specs = self._info.schema.by_name
        spec = specs.get(choose.LAST) or specs.get(choose.AUX)
        dtype = torch.bfloat16 if spec is None else spec.dtype
        model = self._load(self._model, dtype, self._settings.device)
        table = self._reader.index.table
        chosen = self._chosen(numbers, model.max_tokens)
        suspects = [n for n in numbers if table.key(n) in by_head and n not in chosen]
        chosen = sorted({*chosen, *suspects[:SUSPECTS]})
        comparison = Comparison(self._reader, model, self._lens)
        for done, number in enumerate(chosen):
            comparison.add(number)
            self._progress(len(chosen) + done + 1, 2 * len(chosen))
        if cut := comparison.found.cut:
            self._report.notes.append(
                f"of {len(cut)} long samples only the first {model.max_tokens} tokens were compared"
            )
        return comparison.found

    def _chosen(self, numbers: Sequence[int], most: int) -> list[int]:
        """Samples to run the model on."""
        if self._settings.run is not None:
            places = choose.numbers(len(numbers), self._settings.run)
            return [numbers[place] for place in places]
        lengths = self._reader.index.table.tokens
        for count in range(min(RUN, len(numbers)), 0, -1):
            found = [numbers[place] for place in choose.numbers(len(numbers), count)]
            if count <= MIN_RUN or sum(min(int(lengths[n]), most) for n in found) <= RUN_TOKENS:
                break
        return found

    def _combine(self, fits: Fits, by_head: dict[str, Finding], gathered: Gathered) -> None:
        """Findings of both stages, each fault once: what the model says of a sample counts more."""
        report, compared = self._report, verdict(gathered)
        report.layers = compared.layers
        report.compared = {"samples": len(gathered.keys), "tokens": gathered.tokens}
        report.own = gathered.own.to_dict() if gathered.own.tokens else None
        report.notes += compared.notes
        if compared.norm is not None:
            report.norm["found"] = compared.norm
        else:
            report.findings += fits.findings
        right = set(gathered.keys) - compared.wrong - gathered.cut
        heads = {k: finding for k, finding in by_head.items() if k not in right | compared.named}
        report.findings += _grouped(heads)
        report.findings += [left for each in compared.findings if (left := _without(each, heads)) is not None]

    def _masks(self) -> None:
        if choose.MASK not in self._info.schema.by_name:
            self._report.notes.append("masks not checked: the data set has none")
            return
        most = 0 if self._settings.samples == 0 else choose.MASKS
        result = masks.judge(choose.masks(self._reader, most), template.Tokens(self._model))
        self._report.spans = result.spans
        self._report.findings += result.findings
        self._report.notes += [result.why] if result.why else []


def _without(finding: Finding, heads: Mapping[str, Finding]) -> Finding | None:
    """A finding that names no cause, less the samples whose cause the head knows; None where none is left."""
    if finding.kind != "states" or not finding.samples:
        return finding
    left = tuple(key for key in finding.samples if key not in heads)
    return replace(finding, samples=left) if left else None


def _grouped(heads: Mapping[str, Finding]) -> list[Finding]:
    """One finding for all samples with the same."""
    groups: dict[tuple[str, str], list[str]] = {}
    for key, finding in heads.items():
        groups.setdefault((finding.kind, finding.message), []).append(key)
    return [
        Finding(kind, f"{len(keys)} samples: {message}", tuple(keys))
        for (kind, message), keys in groups.items()
    ]
