"""What a directory of finished files can do, wherever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ..reasons import Reason

SUFFIX = ".safetensors"
"""The end of the names of files. Other files are left alone."""


class Directory(ABC):
    """A directory of files. Each is written once, has a random name, and is never changed.

    Its string is the path or URL that messages name. The string that stands for one of its files in
    the methods below is meaningful only to them.
    """

    @abstractmethod
    def __truediv__(self, name: str) -> Directory:
        """The directory of this name inside this one. Neither need exist."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def directories(self) -> Sequence[Directory]:
        """The directories inside this one, sorted by name."""

    @abstractmethod
    def files(self) -> list[str]:
        """The finished files, sorted by name. None for a directory that does not exist or cannot be
        listed.
        """

    @abstractmethod
    def location(self, file: str) -> str:
        """The path or URL of a file, which a user can delete."""

    @abstractmethod
    def size(self, file: str) -> int:
        """The number of bytes of a file."""

    @abstractmethod
    def read(self, file: str) -> bytes:
        """The bytes of a file.

        Raises:
            ValueError: it cannot be read, or is not what was written.
            FileNotFoundError: it does not exist any more.
        """

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Writes a new file, atomically. Creates the directory if needed. Raises OSError if that
        fails.
        """

    @abstractmethod
    def delete(self, file: str) -> None:
        """Deletes a file, if it still exists. Raises OSError if that fails."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[object]:
        """Creates the directory if needed, and locks it until the end of the block or of the
        process. Without effect on storage that has no locks.

        Raises:
            filelock.Timeout: another process holds the lock.
            OSError, NotImplementedError: locks do not work here.
        """

    @abstractmethod
    def leftovers(self) -> list[str]:
        """The names of unfinished files, which are being written, or whose writer was killed."""

    @abstractmethod
    def remove_leftovers(self, all_stored: bool = False) -> None:
        """Deletes unfinished files whose writers no longer run.

        Args:
            all_stored: whether all that the directory is for is in finished files. On storage that
                does not tell whether a writer runs, nothing is deleted before.
        """

    @abstractmethod
    def try_out(self) -> None:
        """Creates the directory if needed, writes and deletes a file, and lists it. Raises OSError
        if any of it fails.
        """

    def unusable_reason(self) -> Reason | None:
        """Returns why files cannot be stored here, or None if they can. Creates the directory if
        needed.
        """
        try:
            self.try_out()
        except OSError as error:
            return Reason("cache-directory", directory=self, error=error)
        return None


def invalid_file(location: object, rule: str, actual: object) -> ValueError:
    return ValueError(
        f"ref_logps: {location} must {rule}; got {actual}. Nothing of it is used. Delete it, so that its rows are "
        "computed again, or choose another cache directory"
    )
