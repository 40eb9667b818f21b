"""Trainers: batches of a data set as each of them expects them, and launchers.

In: a root. Out: what the trainer's own data set and collator make of the producer's files. One module a
trainer, none of which needs the trainer to be installed before it is imported; `base` holds the checks
that they share. Refused: data that a trainer could not use rightly.
"""

from __future__ import annotations
