"""Extract hidden states of a causal language model into hsstream shards.

In: a model (hub name, folder, GGUF file) and sources: text files, jsonl files, or folders of them
(.txt .rst .md .py .jsonl). A jsonl row has `messages` (role, content), `conversations` (ShareGPT: from,
value) or a text field. Out: a data set of `input_ids`, `loss_mask`, `aux_hidden_states` and
`last_hidden_state`, unpadded and unshifted. Run the same command again to continue a stopped run.

    python tools/extract.py --model Qwen/Qwen3-8B --out states chats.jsonl
    hsstream info states

Several processes share the work with --part 0/8 ... --part 7/8, then `hsstream index OUT` commits them.
Exit codes: 0 done, 1 the data is at fault (or the space ran out), 2 the call is at fault.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from extraction.errors import ExtractError

import hsstream as hs
from hsstream.cli.arguments import codec

if TYPE_CHECKING:
    from extraction.job import Job, Run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args = _parser().parse_args(argv)
    try:
        return _extract(args)
    except ExtractError as error:
        return _fail(str(error), error.exit_code)
    except hs.StorageFullError as error:
        return _fail(f"{error}. What was written is kept: free space and run the same command to continue", 1)
    except (hs.SchemaMismatchError, hs.StorageError) as error:
        return _fail(str(error), 2)
    except hs.HsStreamError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted. What was written is kept: run the same command to continue", 130)


def _fail(line: str, code: int) -> int:
    sys.stderr.write(f"extract: {line}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "extract", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", help="text or jsonl files, or folders of them")
    parser.add_argument("--out", required=True, help="root of the data set: a folder or a URL")
    _model_arguments(parser.add_argument_group("model"))
    _source_arguments(parser.add_argument_group("source"))
    _store_arguments(parser.add_argument_group("data set"))
    return parser


def _model_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", required=True, help="hub name, local folder, or GGUF file")
    add("--model-name", help="name to record (default: the hub name, or the name of the folder)")
    add("--revision", help="revision on the hub, and to record")
    add("--gguf-file", help="a GGUF file inside --model")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--layers", type=_ints, help="0-based layer outputs, such as 1,14,26 (default: 1,n/2-1,n-4)")
    add("--last-norm", choices=("post", "pre"), default="post", help="last state: after or before the norm")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", help="cpu, cuda, cuda:1, or auto to spread the model (default: cuda where there is one)")
    add("--batch-size", type=_positive, default=8, help="samples in a forward pass (%(default)s)")
    add("--batch-tokens", type=_positive, default=16_384, help="padded tokens in one (%(default)s)")


def _source_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-length", type=_positive, default=2_048, help="longer texts are cut (%(default)s)")
    add("--max-tokens", type=_positive, help="stop after so many tokens in all")
    add("--loss-mask", choices=("assistant", "all"), default="assistant", help="supervised tokens of a chat")
    add("--chat-template", type=Path, help="file with the template for conversations")
    add("--text-field", default="text", help="the text in a jsonl row (%(default)s)")
    add("--on-bad", choices=("raise", "skip"), default="raise", help="documents that cannot be used")
    add("--window", type=_positive, default=256, help="samples sorted together by length (%(default)s)")


def _store_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--codec",
        type=codec,
        default="fp8",
        help="preset, codec, or aux=CODEC,last=CODEC (%(default)s)",
    )
    add("--top-k", type=_positive, default=64, help="logits that the preset sparse keeps (%(default)s)")
    add("--compression", choices=("lz4", "zstd", "none"), help="default: what suits the codec")
    add("--shard-mb", type=_positive, default=1024, help="size of a shard in MiB (%(default)s)")
    add("--name", help="prefix of the shards (default: hs, or hs-pI with --part)")
    add("--part", type=_part, default=(0, 1), metavar="I/N", help="take every N-th sample, from I on")


def _ints(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected layer ids such as 1,14,26, got {text!r}") from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"expected I/N such as 0/8 with I below N, got {text!r}")
    return int(index), int(count)


def _extract(args: argparse.Namespace) -> int:
    # transformers takes seconds to import: not before the arguments are known to be good
    from extraction.job import run_job
    from extraction.progress import open_progress

    _quiet_transformers()
    job = _job(args)
    progress = open_progress()
    try:
        run = run_job(job, progress)
    finally:
        progress.close()
    for line in _summary(run, args.out):
        print(line)
    return 0


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _job(args: argparse.Namespace) -> Job:
    from extraction.job import Job
    from extraction.target import model_source

    index, count = args.part
    return Job(
        sources=args.sources,
        out=args.out,
        model=model_source(
            args.model,
            name=args.model_name,
            revision=args.revision,
            gguf_file=args.gguf_file,
            trust_remote_code=args.trust_remote_code,
        ),
        layers=args.layers,
        last_norm=args.last_norm,
        dtype=args.dtype,
        device=args.device or _default_device(),
        codec=args.codec,
        compression=args.compression,
        batch_size=args.batch_size,
        batch_tokens=args.batch_tokens,
        window=args.window,
        max_length=args.max_length,
        max_tokens=args.max_tokens,
        loss=args.loss_mask,
        text_field=args.text_field,
        chat_template=_read_template(args.chat_template),
        on_bad=args.on_bad,
        shard_bytes=args.shard_mb << 20,
        name=args.name or (f"hs-p{index}" if count > 1 else "hs"),
        part=args.part,
        top_k=args.top_k,
    )


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExtractError(f"--chat-template {path} cannot be read: {error}") from error


def _summary(run: Run, out: str) -> list[str]:
    """What was done, what was there already, and everything that was left out."""
    from extraction.tokens import told

    counts = run.counts
    lines = [f"{counts.samples:,} samples, {counts.describe()}"] if counts.samples else []
    if counts.known:
        lines.append(f"{counts.known:,} samples ({counts.known_tokens:,} tokens) were there already")
    return [*lines, *told(run.dropped), f"data set at {out}"]


if __name__ == "__main__":
    sys.exit(main())
