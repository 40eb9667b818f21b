"""A training loop over a data set that can stop anywhere and go on where it was.

    python examples/write_states.py my-states
    python examples/train_loop.py my-states --checkpoint run.pt --steps 20
    python examples/train_loop.py my-states --checkpoint run.pt --steps 20    # the next 20

The model is a toy (one linear layer from the captured layers to the last state). The loop around it is
what a trainer needs: batches by token budget, epochs, and a checkpoint that holds the place in the data
beside the weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import hsstream as hs


def open_dataset(root: str) -> hs.HiddenStateDataset:
    """Up to 2,048 tokens a batch, padding counted; lengths padded to multiples of 32."""
    return hs.HiddenStateDataset(
        root,
        batching=hs.Batching(max_tokens=2_048, pad_to=32),
        order=hs.Order(shuffle=True, seed=0),
        tensors=["loss_mask", "aux_hidden_states", "last_hidden_state"],  # the rest is not even read
        dtype=torch.float32,  # on a GPU: leave bfloat16, and batch = batch.to("cuda", non_blocking=True)
    )


def endless(dataset: hs.HiddenStateDataset, epoch: int) -> Iterator[hs.Batch]:
    """Batches from `epoch` on; each epoch has its own order."""
    while True:
        dataset.set_epoch(epoch)  # the epoch of a state just loaded keeps the place within it
        yield from dataset
        epoch += 1


def loss_of(model: nn.Module, batch: hs.Batch) -> torch.Tensor:
    """Error of the predicted last state, over supervised tokens that are not padding."""
    predicted = model(batch["aux_hidden_states"].flatten(2))  # [B, T, L, H] -> [B, T, H]
    counted = batch["loss_mask"] & batch["attention_mask"]  # [B, T]
    return functional.mse_loss(predicted[counted], batch["last_hidden_state"][counted])


def train(root: str, checkpoint: Path, steps: int) -> None:
    """Train for `steps` more steps and write the checkpoint."""
    dataset = open_dataset(root)
    layers, hidden = hs.ShardReader(root).read(0).tensors["aux_hidden_states"].shape[1:]
    torch.manual_seed(0)
    model = nn.Linear(layers * hidden, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done, epoch = 0, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dataset.load_state_dict(saved["data"])  # refuses a state of other data, batching or order
        done, epoch = saved["steps"], saved["data"]["epoch"]

    for step, batch in enumerate(endless(dataset, epoch), start=done + 1):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  epoch {batch.state['epoch']}  loss {loss.item():.4f}  first {batch['keys'][0]}")
        if step == done + steps:
            break

    # batch.state is the place right after this batch, whatever has been read ahead of it
    weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(weights | {"data": batch.state, "steps": step}, checkpoint)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", help="folder or URL of the data set")
    parser.add_argument("--checkpoint", type=Path, default=Path("run.pt"))
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    train(args.root, args.checkpoint, args.steps)


if __name__ == "__main__":
    main()
