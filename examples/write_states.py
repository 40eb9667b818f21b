"""Write your own hidden states: any tensors whose first axis is the token axis.

    python examples/write_states.py my-states
    hsstream info my-states

Run it again: what is sealed already is not written twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

import hsstream as hs

LAYERS, HIDDEN, VOCABULARY = 3, 256, 1_000


def capture(samples: int) -> Iterator[tuple[str, dict[str, torch.Tensor], torch.Tensor]]:
    """Stands for your model: padded states, and the mask that says which tokens are real."""
    random = torch.Generator().manual_seed(0)
    for number in range(samples):
        padded, length = 128, int(torch.randint(16, 129, (), generator=random))
        states = torch.randn(padded, LAYERS + 1, HIDDEN, generator=random).bfloat16()
        tensors = {
            "input_ids": torch.randint(0, VOCABULARY, (padded,), generator=random),
            # which tokens a loss may look at: here the second half, as if the first were a prompt
            "loss_mask": (torch.arange(padded) >= length // 2).int(),
            "aux_hidden_states": states[:, :LAYERS],  # [S, L, H]
            "last_hidden_state": states[:, LAYERS],  # [S, H]
            "entropy": torch.rand(padded, generator=random),  # anything else is stored as it is
        }
        yield f"sample-{number:05d}", tensors, torch.arange(padded) < length


def main() -> None:
    """Write a small data set and read one sample back."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", help="folder or URL of the data set")
    parser.add_argument("--samples", type=int, default=100, help="how many (%(default)s)")
    args = parser.parse_args()

    # What a trainer must know to use the states later. Everything is optional; say what you know.
    model = hs.ModelInfo(
        name="random",
        hidden_size=HIDDEN,
        aux_layer_ids=(1, 7, 12),
        layer_id_convention="layer_output_0based",
        last_hidden_norm="post",
    )
    with hs.ShardWriter(args.root, codec="fp8", model=model) as writer:
        for key, tensors, attention_mask in capture(args.samples):
            if key not in writer:  # sealed by an earlier run
                writer.write(key, tensors, attention_mask=attention_mask, meta={"made_by": "write_states.py"})

    reader = hs.ShardReader(args.root)
    sample = reader.read("sample-00000")
    print(f"{len(reader)} samples, {sum(reader.lengths())} tokens; {sample.key} holds")
    for name, tensor in sample.tensors.items():
        print(f"  {name:<18} {list(tensor.shape)} {tensor.dtype}")


if __name__ == "__main__":
    main()
