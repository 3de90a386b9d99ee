"""Which rows train and which test, as the schema says it, decided row by row as files stream by."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Annotated, Literal, NamedTuple

import numpy as np

from persia_sim.base.schema import Within, check_fields
from runtime.data.errors import DataError
from runtime.data.ids import hash_integers, hash_texts, join_hashes, mix64
from runtime.data.rows import (
    FORMS,
    Rows,
    Threshold,
    at_least,
    equals,
    order_of,
    threshold_of,
    written,
)
from runtime.data.source import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which rows train and which test: by a column's value, at random, by place, the last ones of
    each group, or by file."""

    column: str | None = None
    """The column that decides, with ``test_from`` or ``test_equals``; or by which
    ``leave_one_out`` orders the rows."""
    test_from: int | float | str | date | None = None
    """First test value of ``column``: rows below it train, it and all above it test. Numbers
    compare as numbers, dates (TOML dates, or texts YYYY-MM-DD, also with HH:MM:SS) as dates;
    quoting changes nothing."""
    test_equals: str | None = None
    """The rows whose ``column`` holds this text test, all others train."""
    test_fraction: Annotated[float | None, Within(0, 1, without="both")] = None
    """Share of the rows that test, > 0 and < 1, when no column decides."""
    random_seed: Annotated[int | None, Within(0, 2**63 - 1)] = None
    """Seed by which the rows of ``test_fraction`` are drawn (numpy default_rng(seed).random() <
    fraction); None takes the last rows of the file. 0 to 2**63 - 1."""
    by_group: bool | None = None
    """Whether ``test_fraction`` and ``validation_fraction`` draw whole groups of the schema's
    ``group``, by a hash of group and seed; a sample without one is drawn by itself."""
    leave_one_out: Literal["test_only", "valid_and_test"] | None = None
    """The last row of each of the schema's groups tests, and with valid_and_test the one before it
    validates; the first row of a group always trains, and so do rows without one. Last by the
    numbers or dates of ``column``, or else, and among equal ones, by the order of the files."""
    test_file: str | None = None
    """A file, or a pattern, whose rows test; all rows of the schema's ``file`` train."""
    validation_file: str | None = None
    """A file, or a pattern, whose rows validate; beside ``test_file``."""
    validation_fraction: Annotated[float, Within(0, 1, without="most")] = 0.0
    """Share of the training samples kept for validation; 0 to below 1. The last of them or, with
    ``by_group``, some of the groups."""

    def __post_init__(self) -> None:
        check_fields(self)

        # Exactly one way to split.
        ways = [
            name
            for name in ("test_from", "test_equals", "test_fraction", "leave_one_out", "test_file")
            if getattr(self, name) is not None
        ]
        by_column = ways in (["test_from"], ["test_equals"])
        orders = ways == ["leave_one_out"]
        if len(ways) != 1 or (by_column != (self.column is not None) and not orders):
            given = ways if self.column is None else ["column", *ways]
            raise ValueError(
                "a split needs either column and test_from, or column and test_equals, or"
                f" test_fraction, leave_one_out or test_file, got"
                f" {' and '.join(given) or 'none of them'}"
            )
        if self.leave_one_out == "valid_and_test" and self.validation_fraction:
            raise ValueError(
                "leave_one_out valid_and_test and validation_fraction both say what validates;"
                " remove one"
            )

        # What goes with only one of them.
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
        if self.random_seed is not None and self.test_fraction is None:
            decides = "a column" if by_column else "a file"
            raise ValueError(f"random_seed is for test_fraction, {decides} decides; remove it")
        if self.by_group and self.random_seed is None:
            raise ValueError("by_group goes with test_fraction and random_seed; add them")
        if self.test_from is not None:
            threshold_of(self.test_from)

    @property
    def threshold(self) -> Threshold | None:
        """``test_from`` as the number or the instant that it means."""
        return None if self.test_from is None else threshold_of(self.test_from)

    @property
    def rule(self) -> str:
        """What a value of the split's column must be, in words."""
        if self.leave_one_out is not None:
            return f"the split orders each group by this column: write digits, or dates, {FORMS}"
        if self.test_from is None:
            return f"the split compares this column with {self.test_equals!r}"
        if isinstance(self.threshold, datetime):
            zone = "with" if self.threshold.tzinfo is not None else "without"
            kind = f"dates: write {FORMS}, {zone} a zone"
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
        # Who decides: files, a column's value, a moment, chance, or the order.
        if self.test_file is not None:
            words = f"test {self.test_file}, train the main file"
            if self.validation_file is not None:
                words += f"; validation: {self.validation_file}"
        elif self.test_equals is not None:
            words = f"test {self.column} == {self.test_equals!r}, train the others"
        elif self.test_from is not None:
            kind = " (as dates)" if isinstance(self.threshold, datetime) else ""
            words = f"train {self.column} < {self._threshold_words}{kind}, test the others"
        elif self.leave_one_out is not None:
            by = "" if self.column is None else f" by {self.column}"
            words = f"test the last row of each group{by}, train the others"
            if self.leave_one_out == "valid_and_test":
                words += "; validation: the one before it"
        elif self.random_seed is not None:
            what = "groups" if self.by_group else "rows"
            words = f"test a random {self.test_fraction} of the {what}, seed {self.random_seed}"
        else:
            words = f"test the last {self.test_fraction} of the rows"
        if self.validation_fraction:
            share = f"{self.validation_fraction} of"
            words += "; validation: "
            words += (
                f"{share} the groups that train" if self.by_group else f"the last {share} train"
            )
        return words


CODES: dict[Part, int] = {"train": 0, "validation": 1, "test": 2}
UNPLACED = -1
"""Code of a row whose split column holds no usable value."""
NOT_READ = 3
"""Code of a training sample behind those that were asked for."""


class LeftOut(NamedTuple):
    """The rows that ``leave_one_out`` takes out of training, by their places over all files."""

    test: np.ndarray
    validation: np.ndarray
    unusable: np.ndarray
    """Those whose ``column`` holds nothing that orders them."""


def left_out(split: Split, missing: Collection[str], group: str, stream: Iterable[Rows]) -> LeftOut:
    """Find the last rows of each group, of all rows of a table; 36 bytes a row meanwhile.

    Raises DataError for a column that orders some rows by numbers and others by dates.
    """
    # Of every row its group, what orders it, and its place.
    parts: list[tuple[np.ndarray, ...]] = []
    kinds = set[type]()
    for rows in stream:
        texts, which = written(rows.table.column(group), missing)
        order = np.zeros(len(which), np.longdouble)
        if split.column is not None:
            order, found = order_of(rows.table.column(split.column), missing)
            kinds |= found
        hashes = np.append(hash_texts(texts), np.uint64(0))[which]
        parts.append((hashes, order, rows.places, which < len(texts)))
    if len(kinds) > 1:
        raise DataError(
            f"column {split.column} holds numbers and dates, and the split orders each group by it;"
            " write one of them"
        )
    group_of, order_by, places, has_group = (np.concatenate(p) for p in zip(*parts, strict=True))
    unusable = np.isnan(order_by)
    ordered = ~unusable & has_group
    in_group = places[ordered]

    # Group by group in order: how many rows come behind each, and whether one stands before it.
    by_group = np.lexsort((in_group, order_by[ordered], group_of[ordered]))
    sorted_groups = group_of[ordered][by_group]
    starts = np.flatnonzero(np.diff(sorted_groups, prepend=~sorted_groups[:1]))
    sizes = np.diff(np.append(starts, len(by_group)))
    behind = np.repeat(starts + sizes, sizes) - 1 - np.arange(len(by_group))
    is_first = behind == np.repeat(sizes, sizes) - 1
    tests, validates = (np.sort(in_group[by_group[~is_first & (behind == k)]]) for k in (0, 1))
    return LeftOut(
        test=tests,
        validation=validates if split.leave_one_out == "valid_and_test" else validates[:0],
        unusable=places[unusable],
    )


@dataclass(slots=True)
class Placer:
    """Gives each row of one stream its part; call ``place`` once for each chunk, in order."""

    split: Split
    missing: Collection[str]
    rows: int = 0
    """Rows of the file; needed by a split that tests the last ones."""
    train_rows: int = 0
    """Rows that train or validate, as many as were asked for; needed when there is a validation
    part."""
    group: str | None = None
    """The column of groups; needed by a split by them."""
    left_out: LeftOut | None = None
    """The rows that are left out; needed by ``leave_one_out``."""
    _train_seen: int = 0
    _drawn: int = 0
    _generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.split.random_seed)

    def begin_behind(self, rows: int) -> None:
        """Before the first chunk: it comes behind so many rows of files that are not looked at."""
        self._drawn = rows
        generator = self._generator.bit_generator
        if rows and isinstance(generator, np.random.PCG64):  # that of default_rng: a step a draw
            generator.advance(rows)

    def place(self, rows: Rows) -> np.ndarray:
        """int64 [B] codes of the rows' parts."""
        in_test, unusable = self._in_test(rows)
        codes = np.where(in_test, CODES["test"], CODES["train"])
        codes[unusable] = UNPLACED
        if rows.part == "validation":
            codes[:] = CODES["validation"]
        if self.left_out is not None:
            codes[np.isin(rows.places, self.left_out.validation)] = CODES["validation"]
        if self.split.validation_fraction:
            train = codes == CODES["train"]
            order = self._train_seen + np.cumsum(train)  # 1 for the first training sample
            codes[train & self._validates(rows, order)] = CODES["validation"]
            codes[train & (order > self.train_rows)] = NOT_READ
            self._train_seen = int(order[-1])
        return codes

    def _validates(self, rows: Rows, order: np.ndarray) -> np.ndarray:
        """bool [B], whether each row would validate if it did not test."""
        split = self.split
        if not split.by_group:
            return order > round(self.train_rows * (1 - split.validation_fraction))
        assert split.test_fraction is not None  # the split's own check
        share = (1 - split.test_fraction) * split.validation_fraction
        result: np.ndarray = self._draws_of_groups(rows) < split.test_fraction + share
        return result

    def _in_test(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """bool [B], whether each row tests; bool [B], whether its split column is unusable."""
        split = self.split
        none_unusable = np.zeros(len(rows.numbers), bool)
        if rows.part is not None:
            return none_unusable | (rows.part == "test"), none_unusable
        if split.threshold is not None:
            return at_least(rows.table.column(split.column), split.threshold, self.missing)
        if split.column is not None and split.test_equals is not None:
            return equals(rows.table.column(split.column), split.test_equals, self.missing)
        if self.left_out is not None:
            tests, _, unusable = (np.isin(rows.places, places) for places in self.left_out)
            return tests, unusable
        assert split.test_fraction is not None  # the split's own check
        if split.random_seed is None:
            last = round(self.rows * (1 - split.test_fraction))
            return rows.places > last, none_unusable
        if split.by_group:
            return self._draws_of_groups(rows) < split.test_fraction, none_unusable
        # Draw k of the seed's sequence is for the row with number k, rows left out included.
        draws = self._generator.random(int(rows.places[-1]) - self._drawn)
        mine = draws[rows.places - 1 - self._drawn]
        self._drawn = int(rows.places[-1])
        return mine < split.test_fraction, none_unusable

    def _draws_of_groups(self, rows: Rows) -> np.ndarray:
        """float64 [B], 0 to below 1, the same for all samples of a group."""
        assert self.group is not None and self.split.random_seed is not None  # the schema's check
        texts, which = written(rows.table.column(self.group), self.missing)
        hashes = np.append(hash_texts(texts), np.uint64(0))[which]
        alone = which == len(texts)
        hashes[alone] = mix64(rows.places[alone])
        seeds = hash_integers(np.full(len(hashes), self.split.random_seed))
        return (join_hashes(seeds, hashes) >> np.uint64(11)) * 2.0**-53
