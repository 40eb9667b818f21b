"""Which bytes the next samples need, and getting them: views of local files, joined ranges of others.

::

    jobs -> Fetcher (groups) -> ranges (joined reads) -> RemoteFetcher (threads, a bound in bytes)
                             `-> DirectBytes (mapped files)

In: requests, in the sequence in which they will be used. Out: `SampleBytes` for each, which say when all
bytes are here. Neighbouring ranges are joined into reads of some MB that run side by side; what is in
flight or held, compressed, stays under a limit (one sample more than the limit is taken alone). Nothing
here decodes or checks bytes beyond their number.
"""

from __future__ import annotations

from hsstream.fetch.ahead import Fetcher
from hsstream.fetch.direct import DirectBytes, SampleBytes
from hsstream.fetch.remote import RemoteFetcher
from hsstream.fetch.request import Request

__all__ = ["DirectBytes", "Fetcher", "RemoteFetcher", "Request", "SampleBytes"]
