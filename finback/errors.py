"""Errors this package raises on purpose.

FinbackError
  UsageError             options or arguments that cannot be used; exit 2
  CheckpointError        the files are not what they should be; exit 3
    DamagedFile          a file is cut, torn, or says what cannot be
    MissingTensor
    UnsupportedModel
    TokenizerError
  CapacityError          it does not fit; exit 4
  RequestError           the caller's fault; HTTP 400, exit 2
    ContextTooLong
  ReadError              the device or file system failed; exit 3

Each class carries the exit code of the command line.
"""

from typing import ClassVar


class FinbackError(Exception):
    """Anything this package refuses or cannot do; the text says what, where and what to do."""

    exit_code: ClassVar[int] = 1


class UsageError(FinbackError):
    """An option or argument that cannot be used."""

    exit_code = 2


class CheckpointError(FinbackError):
    """The files of a model are not what they should be."""

    exit_code = 3


class DamagedFile(CheckpointError):
    """A file is cut, torn or contradicts itself."""


class MissingTensor(CheckpointError):
    """The model needs a tensor that no file holds."""


class UnsupportedModel(CheckpointError):
    """A valid checkpoint of a kind this package does not run."""


class TokenizerError(CheckpointError):
    """The vocabulary files cannot be used."""


class CapacityError(FinbackError):
    """Something does not fit into the memory or the room it was given."""

    exit_code = 4


class RequestError(FinbackError):
    """A prompt, a conversation or a sampling option that cannot be served."""

    exit_code = 2


class ContextTooLong(RequestError):
    """Prompt and answer together pass the model's context."""


class ReadError(FinbackError):
    """A file ended early, vanished or could not be read while it was in use."""

    exit_code = 3
