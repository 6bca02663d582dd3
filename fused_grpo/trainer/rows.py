"""A data set whose rows are looked at when they are read, so that a bad one is named."""

from __future__ import annotations

from typing import Any


def is_row(row: Any) -> bool:
    """Whether it has a prompt: text, or messages."""
    return isinstance(row, dict) and isinstance(row.get("prompt"), (str, list))


class DatasetError(ValueError):
    """A row of a data set cannot be read, or is none that can be trained on."""


class Rows:
    """The rows of a data set, by number.

    Raises:
        DatasetError: from indexing, naming the data set, the row and what is wrong with it.
    """

    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self.dataset = name, dataset
        self._columns: frozenset[str] | None = None  # of the first row that was read

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        place = f"{self.name}[{number}]"
        try:
            row = self.dataset[number]
        except Exception as error:  # whatever a file, a decoder or a transform makes of it
            raise DatasetError(
                f"{place} cannot be read, {type(error).__name__}: {error}; leave the row out or "
                "put it right"
            ) from error
        if not is_row(row):
            raise DatasetError(f'{place} has no "prompt" (text or messages): {row!r:.200}')
        columns = frozenset(row)
        self._columns = self._columns or columns
        if columns != self._columns:
            other = ", ".join(map(repr, sorted(map(str, columns ^ self._columns))))
            raise DatasetError(
                f"{place} does not have the columns of other rows, differing in {other}: reward "
                "functions get every column as a list, so give all rows the same (None will do)"
            )
        return row
