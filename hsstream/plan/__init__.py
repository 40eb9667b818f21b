"""The order of an epoch, decided from lengths before a byte is read (DESIGN.md, "The plan").

In: the lengths and shard ordinals of the selected samples, a `Batching`, an `Order`, an epoch.
Out: a `Plan` (the sequence of micro-batches), the part of it that each rank takes, and the small
state that resumes it. Refused: settings that contradict each other, samples longer than the budget
(unless truncated), an epoch without a step, a state that belongs to something else.

Everything here is pure: numpy, no I/O, the result depends on the arguments alone.
"""

from __future__ import annotations

from hsstream.plan.epoch import plan_epoch
from hsstream.plan.policy import Batching, Order
from hsstream.plan.schedule import batch_for, steps
from hsstream.plan.sequence import Plan
from hsstream.plan.state import STATE_VERSION, check_state, fingerprint, make_state

__all__ = [
    "STATE_VERSION",
    "Batching",
    "Order",
    "Plan",
    "batch_for",
    "check_state",
    "fingerprint",
    "make_state",
    "plan_epoch",
    "steps",
]
