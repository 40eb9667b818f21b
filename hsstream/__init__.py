"""Store LLM hidden states once, stream them to any trainer.

The public names, and nothing else; the rooms behind them are described in DESIGN.md, the bytes in
FORMAT.md.
"""

try:
    import fcntl  # noqa: F401
except ImportError:
    raise ImportError(
        "hsstream runs on Linux and macOS: this platform has no POSIX file locks (fcntl); on Windows use WSL"
    ) from None

from hsstream.batch import Batch
from hsstream.dataset import HiddenStateDataset
from hsstream.errors import (
    CorruptDataError,
    ForkError,
    FormatError,
    HsStreamError,
    NonFiniteError,
    ResumeError,
    SampleError,
    SchemaMismatchError,
    StorageError,
    StorageFullError,
    TruncatedShardError,
    UnsupportedVersionError,
)
from hsstream.plan import Batching, Order, Plan, plan_epoch
from hsstream.reader import ShardReader
from hsstream.sample import ModelInfo, Sample
from hsstream.stock import decode
from hsstream.teacher import TopKTeacher
from hsstream.version import __version__
from hsstream.writer import ShardWriter

__all__ = [
    "Batch",
    "Batching",
    "CorruptDataError",
    "ForkError",
    "FormatError",
    "HiddenStateDataset",
    "HsStreamError",
    "ModelInfo",
    "NonFiniteError",
    "Order",
    "Plan",
    "ResumeError",
    "Sample",
    "SampleError",
    "SchemaMismatchError",
    "ShardReader",
    "ShardWriter",
    "StorageError",
    "StorageFullError",
    "TopKTeacher",
    "TruncatedShardError",
    "UnsupportedVersionError",
    "__version__",
    "decode",
    "plan_epoch",
]
