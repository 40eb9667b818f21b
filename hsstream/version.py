"""The release, and how shards name the software that wrote them."""

__version__ = "0.1.0"
WRITER = f"hsstream {__version__}"
