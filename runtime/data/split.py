"""Which rows train and which test, as the schema says it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime

from runtime.data.ordering import Threshold, threshold_of
from runtime.data.typed import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which rows train and which test: by a column's value, at random, by place, or by file."""

    column: str | None = None
    """The column that decides, with ``test_from`` or ``test_equals``."""
    test_from: int | float | str | date | None = None
    """First test value of ``column``: rows below it train, it and all above it test. Numbers
    compare as numbers, dates (TOML dates, or texts YYYY-MM-DD, also with HH:MM:SS) as dates;
    quoting changes nothing."""
    test_equals: str | None = None
    """The rows whose ``column`` holds this text test, all others train."""
    test_fraction: float | None = None
    """Share of the rows that test, > 0 and < 1, when no column decides."""
    random_seed: int | None = None
    """With ``test_fraction``: draw rows at random (numpy default_rng(seed).random() < fraction);
    None takes the last rows of the file. 0 to 2**63 - 1."""
    test_file: str | None = None
    """A file, or a pattern, whose rows test; all rows of the schema's ``file`` train."""
    validation_file: str | None = None
    """With ``test_file``: a file, or a pattern, whose rows validate."""
    validation_fraction: float = 0.0
    """Share of the training rows, the last of them, kept for validation; 0 to below 1."""

    def __post_init__(self) -> None:
        check_types(self)
        ways = [
            name
            for name in ("test_from", "test_equals", "test_fraction", "test_file")
            if getattr(self, name) is not None
        ]
        by_column = ways in (["test_from"], ["test_equals"])
        if len(ways) != 1 or by_column != (self.column is not None):
            given = ways if self.column is None else ["column", *ways]
            raise ValueError(
                "a split needs either column and test_from, or column and test_equals, or"
                f" test_fraction, or test_file, got {' and '.join(given) or 'none of them'}"
            )
        if self.test_fraction is not None and not 0 < self.test_fraction < 1:
            raise ValueError(
                f"test_fraction must be > 0 and < 1, got {self.test_fraction}:"
                " both parts need rows, a run is scored on the test part"
            )
        for name in ("test_file", "validation_file"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty; give it a file's name, or leave it out")
        if self.validation_file is not None:
            if self.test_file is None:
                raise ValueError("validation_file goes with test_file; add it, or remove both")
            if self.validation_fraction:
                raise ValueError(
                    "validation_file and validation_fraction both say what validates; remove one"
                )
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be >= 0 and < 1, got {self.validation_fraction}"
            )
        if self.random_seed is not None:
            if self.test_fraction is None:
                decides = "a column" if by_column else "a file"
                raise ValueError(f"random_seed is for test_fraction, {decides} decides; remove it")
            if not 0 <= self.random_seed < 2**63:
                raise ValueError(f"random_seed must be 0 to 2**63 - 1, got {self.random_seed}")
        if self.test_from is not None:
            threshold_of(self.test_from)

    @property
    def threshold(self) -> Threshold | None:
        """``test_from`` as the number or the instant that it means."""
        return None if self.test_from is None else threshold_of(self.test_from)

    @property
    def rule(self) -> str:
        """What a value of the split's column must be, in words."""
        if self.test_from is None:
            return f"the split compares this column with {self.test_equals!r}"
        if isinstance(self.threshold, datetime):
            zone = "with" if self.threshold.tzinfo is not None else "without"
            kind = f"dates: write YYYY-MM-DD, also with HH:MM:SS, {zone} a zone"
        else:
            kind = "numbers: write digits"
        return f"the split compares this column with {self._threshold_words} as {kind}"

    @property
    def _threshold_words(self) -> str:
        threshold = self.threshold
        if isinstance(threshold, datetime):
            return threshold.isoformat(sep=" ").removesuffix(" 00:00:00")
        return str(threshold)

    def __str__(self) -> str:
        """The split in words.

        >>> print(Split(column="date", test_from=20220505, validation_fraction=0.1))
        train date < 20220505, test the others; validation: the last 0.1 of train
        >>> print(Split(column="day", test_from="2013-02-09"))
        train day < 2013-02-09 (as dates), test the others
        """
        if self.test_file is not None:
            words = f"test {self.test_file}, train the main file"
            if self.validation_file is not None:
                words += f"; validation: {self.validation_file}"
        elif self.test_equals is not None:
            words = f"test {self.column} == {self.test_equals!r}, train the others"
        elif self.test_from is not None:
            kind = " (as dates)" if isinstance(self.threshold, datetime) else ""
            words = f"train {self.column} < {self._threshold_words}{kind}, test the others"
        elif self.random_seed is not None:
            words = f"test a random {self.test_fraction} of the rows, seed {self.random_seed}"
        else:
            words = f"test the last {self.test_fraction} of the rows"
        if self.validation_fraction:
            words += f"; validation: the last {self.validation_fraction} of train"
        return words
