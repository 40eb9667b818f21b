"""Is the capture right? A wrong one trains without a word.

In: a data set and the folder of the model that it was captured from. Out: a `Report`: how well the model's
own head, on the stored last states, predicts the stored tokens, and what is wrong.

::

    choose   which samples, which of their tokens; all masks that the mask check looks at
    lens     head(norm(last)) against tokens: of the sample at every shift, of other samples
    judge    one sample: right, shifted, short of a prefix, of another request
    masks    where supervised spans begin, against the chat template that the tokens show
    probe    the model itself run on a few samples: which layer is each stored state
    run      all of it, and the report
"""

from __future__ import annotations

from hsstream.audit.report import Finding, Report
from hsstream.audit.run import Settings, audit

__all__ = ["Finding", "Report", "Settings", "audit"]
