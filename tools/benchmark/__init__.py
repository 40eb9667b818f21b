"""The parts of tools/bench.py: data, loaders, interleaved repetitions, reports."""
