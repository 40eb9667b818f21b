"""The parts of tools/extract.py: sources, tokens, loss masks, the model and its captured states."""
