"""What `hsstream pack` says: what packing would take, and what a run did.

In: a `Projection` or a `Report`. Out: lines for people; whatever yields nothing, or less than it might, says
why, by counts.
"""

from __future__ import annotations

import re
from collections import Counter

from hsstream.cli.output import count, counted, percent, ratio, size
from hsstream.packing import Bad, Projection, Report

#: Different reasons that are listed, and names.
MAX_REASONS = 5
_NUMBERS = re.compile(r"\d+")


def projection_text(found: Projection) -> str:
    """Three lines; more where files cannot be read or hold what is not taken over."""
    files = counted(found.files, "file")
    samples = "" if found.samples == found.files else f" with {counted(found.samples, 'sample')}"
    looked = f"{count(found.looked_at)} looked at: {count(found.mean_tokens)} tokens each on average"
    free = "" if found.free is None else f"; {size(found.free)} are free there"
    lines = [
        f"{found.source}: {found.format}, {files}{samples}, {size(found.source_bytes)}",
        f"{looked}, {percent(found.padding, 1)} padding; {', '.join(found.tensors)}",
        f"as {found.codec}: about {size(found.stored_bytes)}, "
        f"{ratio(found.stored_bytes, found.source_bytes)} of the source{free}",
    ]
    if found.dropped:
        lines.append(_dropped(found.dropped))
    if found.bad:
        lines.append(f"{counted(found.bad, 'file')} looked at cannot be read: {found.first_bad}")
    return "\n".join(lines)


def report_text(report: Report) -> str:
    """What was done, what was there already, what was left out, what could not be taken over."""
    if not report.format:
        return f"no source files are left; {report.root} is committed"
    packed = f"{counted(report.samples, 'sample')}, {count(report.tokens)} tokens"
    lines = [
        f"packed {packed} of {counted(report.files, f'{report.format} file')} into {report.root}: "
        f"{size(report.stored_bytes)} in {counted(report.shards, 'shard')}"
    ]
    if report.known:
        lines.append(f"{counted(report.known, 'sample')} were there already, with the same tokens")
    if report.padding:
        lines.append(_padding(report))
    if report.dropped:
        lines.append(_dropped(report.dropped))
    if report.deleted:
        lines.append(f"{counted(report.deleted, 'source file')} deleted")
    if report.bad:
        where = f", listed in {report.bad_list}" if report.bad_list else ""
        lines.append(f"{counted(len(report.bad), 'file')} left{where}:")
        lines += [f"  {line}" for line in _reasons(report.bad)]
    return "\n".join(lines)


def _padding(report: Report) -> str:
    rows = report.tokens + report.padding
    line = f"{count(report.padding)} rows of padding cut off ({percent(report.padding, rows)})"
    if report.tokens:
        line += (
            f": a loss that is a mean over padded tokens too, as SpecForge's, becomes up to "
            f"{rows / report.tokens:.1f} times as large"
        )
    return line


def _dropped(names: dict[str, int]) -> str:
    found = sorted(names.items(), key=lambda each: -each[1])
    listed = ", ".join(f"{name} ({counted(number, 'sample')})" for name, number in found[:MAX_REASONS])
    more = f" and {len(found) - MAX_REASONS} more" if len(found) > MAX_REASONS else ""
    return f"not in the data set: {listed}{more}"


def _reasons(bad: list[Bad]) -> list[str]:
    """Every kind of reason once, with the first file and how many there are."""
    kinds = Counter(_NUMBERS.sub("N", each.reason) for each in bad)
    first: dict[str, Bad] = {}
    for each in bad:
        first.setdefault(_NUMBERS.sub("N", each.reason), each)
    lines = []
    for kind, number in kinds.most_common(MAX_REASONS):
        more = f" (and {count(number - 1)} more like it)" if number > 1 else ""
        lines.append(f"{first[kind].path}: {first[kind].reason}{more}")
    rest = sum(number for _, number in kinds.most_common()[MAX_REASONS:])
    return [*lines, f"{counted(rest, 'file')} for other reasons"] if rest else lines
