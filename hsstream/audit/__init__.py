"""Is the capture right? A wrong one trains without a word.

In: a data set and the folder of the model that it was captured from. Out: a `Report`: what is wrong, with
the states and samples it was seen in, how well the stored states predict the stored tokens beside the
model's own, and what could not be checked.

::

    choose    which samples, which of their tokens; all masks that the mask check looks at
    fits      what the model's head says of many samples, and whom it suspects: lens, judge
    lens      head(norm(last)) against tokens: of the sample at every shift, of other samples
    judge     one sample: right, shifted, short of a prefix, of another request
    states    the model itself run on some of them, every stored row against its own: probe, compare, explain
    probe     the model's states for tokens, plain and rounded at random
    compare   which rows have more error than codec and rounding explain
    explain   what they are instead: another layer, size, place, sample
    verdict   findings from what all samples showed
    masks     where supervised spans begin and end, against the chat template: template, or as the tokens show
    run       all of it, and the report
"""

from __future__ import annotations

from hsstream.audit.report import Finding, Report
from hsstream.audit.run import Settings, audit

__all__ = ["Finding", "Report", "Settings", "audit"]
