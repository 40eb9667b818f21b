"""Errors of the extraction tool: each is one line for a person, with the exit code it stands for."""

from __future__ import annotations


class ExtractError(Exception):
    """Stops the run; `exit_code` is 1 when the data is at fault, 2 when the call is."""

    exit_code = 2


class SourceError(ExtractError):
    """A document that cannot be read or used; the message names the file and line."""

    exit_code = 1


class SpaceError(ExtractError):
    """The target has too little free space for the states to come."""

    exit_code = 1
