"""A training loop that reads its data set from a web server.

    tools/services/nginx.sh start /tmp/nginx my-states        # serves the folder; prints the URL
    python examples/read_http.py http://127.0.0.1:PORT

Any server with byte ranges will do. The batches, their order and the resume states are those of the same
folder on a disk; nothing is copied to a disk first.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hsstream as hs


def train(url: str, storage_options: dict[str, Any], epochs: int) -> None:
    """A linear model from the captured layers to the last state."""
    dataset = hs.HiddenStateDataset(
        url,
        batching=hs.Batching(max_tokens=2_048, pad_to=32),
        tensors=["loss_mask", "aux_hidden_states", "last_hidden_state"],  # only their bytes are fetched
        dtype=torch.float32,
        storage_options=storage_options,
        prefetch_bytes=256 << 20,  # at most this much is on its way or held, compressed
    )
    aux = dataset.catalog.first.index.info.schema.by_name["aux_hidden_states"]
    layers, hidden = aux.trailing
    torch.manual_seed(0)
    model = nn.Linear(layers * hidden, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        total = 0.0
        for batch in dataset:
            counted = batch["loss_mask"] & batch["attention_mask"]  # [B, T]
            predicted = model(batch["aux_hidden_states"].flatten(2))  # [B, T, L, H] -> [B, T, H]
            loss = functional.mse_loss(predicted[counted], batch["last_hidden_state"][counted])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}  loss {total / len(dataset):.5f}  {dataset.stats().verdict}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="the folder of the data set")
    parser.add_argument("--user", help="for a server that asks for a login")
    parser.add_argument("--password")
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    # Headers that expire: storage_options={"headers": function}, which is called again after a 401 or 403.
    train(args.url, {"username": args.user, "password": args.password}, args.epochs)


if __name__ == "__main__":
    main()
