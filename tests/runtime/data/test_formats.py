"""Files of other libraries: guessed, trained on, and scored without their labels."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.__main__ import main
from runtime.data.batch import Batch
from runtime.data.errors import DataError
from runtime.data.guess import guessed
from runtime.data.ids import hash_integers, hash_texts, tag
from runtime.data.open import open_source
from runtime.data.schema import read_schema

ATOMIC = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
ROWS = "".join(f"u{n % 7}\t{n % 5}\t{1 + n % 5}.0\t{881250949 + n}\n" for n in range(50))
USERS = "user_id:token\tage:token\n" + "".join(f"u{n}\t{20 + n}\n" for n in range(6))
ITEMS = (
    'item_id:token\ttitle:token_seq\tprice:float\tvector:float_seq\n'
    + "".join(f'{n}\t"Open {n}\t{n}.5\t0.1 0.2\n' for n in range(5))
)  # fmt: skip
LIBSVM = "".join(
    f"{'+1' if n % 3 else '-1'} {1 + n % 4}:1 {10 + n % 6}:1 30:{0.25 * (1 + n % 8)}\n"
    for n in range(40)
)
FFM = "".join(
    f"{n % 2} 0:0:{0.5 * (n % 6)} 1:{10 + n % 5}:0.2 1:{20 + n % 3}:0.2 2:{40 + n % 7}:1\n"
    for n in range(40)
)


def opened(folder, name: str, text: str):
    (folder / name).write_text(text)
    (folder / "s.toml").write_text(guessed(folder / name))
    return read_schema(folder / "s.toml")[0], open_source(str(folder / "s.toml"))


def whole(source) -> Batch:
    return Batch.concat([chunk for part in ("train", "test") for chunk in source.chunks(part)])


def test_atomic_files_are_joined_and_typed(tmp_path):
    (tmp_path / "ml.user").write_text(USERS)
    (tmp_path / "ml.item").write_text(ITEMS)
    schema, source = opened(tmp_path, "ml.inter", ATOMIC + ROWS)
    assert {c.name: c.kind for c in schema.columns} == {
        "user_id": "categorical", "item_id": "categorical", "age": "categorical",
        "title": "multi", "price": "numeric",
    }  # fmt: skip
    assert schema.regression == schema.labels == ("rating",) and schema.group == "user_id"
    assert schema.split.column == "timestamp"
    batch = whole(source)
    assert batch.labels[:, 0].tolist() == [1 + n % 5 for n in range(50)]
    # The sixth user stands in no line of the users; a quote is a character of the title.
    assert batch.dense[:, 0] == pytest.approx(np.log1p([n % 5 + 0.5 for n in range(50)]))
    assert tag(3, hash_texts(['"Open']))[0] in batch.ids
    absent = tag(2, hash_texts([""]))[0]
    assert (batch.ids == absent).sum() == sum(n % 7 == 6 for n in range(50))


def test_an_atomic_column_without_its_type_is_refused(tmp_path):
    (tmp_path / "s.toml").write_text(
        'name = "s"\nfile = "x.inter"\nformat = "recbole"\nlabels = ["y"]\n'
        'split = { test_fraction = 0.5 }\ncolumns = ["user"]\n'
    )
    (tmp_path / "x.inter").write_text("user:token\ty\na\t1\n")
    with pytest.raises(DataError, match=r"column 'y' has no type; .* NAME:TYPE"):
        list(open_source(str(tmp_path / "s.toml")).chunks("train"))


def test_libsvm_is_a_list_of_indexes_and_the_values_that_differ(tmp_path):
    schema, source = opened(tmp_path, "a.svm", LIBSVM)
    assert [(c.name, c.kind) for c in schema.columns] == [
        ("features", "multi"),
        ("30:value", "numeric"),
    ]
    test = np.random.default_rng(1).random(40) < 0.2
    order = [*np.flatnonzero(~test), *np.flatnonzero(test)]
    batch = whole(source)
    assert batch.labels[:, 0].tolist() == [float(n % 3 > 0) for n in order]
    assert batch.dense[:, 0] == pytest.approx(np.log1p([0.25 * (1 + n % 8) for n in order]))
    expected = [hash_integers(np.array([1 + n % 4, 10 + n % 6])) for n in order]
    np.testing.assert_array_equal(batch.ids, tag(0, np.concatenate(expected)))


def test_ffm_has_a_column_for_each_field(tmp_path):
    schema, source = opened(tmp_path, "a.ffm", FFM)
    assert [(c.name, c.kind) for c in schema.columns] == [
        ("0:value", "numeric"),
        ("1", "multi"),
        ("2", "categorical"),
    ]
    test = np.random.default_rng(1).random(40) < 0.2
    order = [*np.flatnonzero(~test), *np.flatnonzero(test)]
    batch = whole(source)
    assert batch.dense[:, 0] == pytest.approx(np.log1p([0.5 * (n % 6) for n in order]))
    pairs = [tag(0, hash_integers(np.array([10 + n % 5, 20 + n % 3]))) for n in order]
    last = [tag(1, hash_integers(np.array([40 + n % 7]))) for n in order]
    assert batch.ids.tolist() == [i for a, b in zip(pairs, last, strict=True) for i in [*a, *b]]


@pytest.mark.parametrize(("text", "name"), [(LIBSVM, "a.txt"), (FFM, "b.txt")])
def test_a_line_that_is_none_of_the_format_is_told_by_its_number(tmp_path, text, name):
    _, source = opened(tmp_path, name, text)
    lines = text.splitlines()
    (tmp_path / name).write_text("\n".join([*lines[:6], "1 3:", *lines[6:]]))
    source = open_source(str(tmp_path / "s.toml"))
    with pytest.raises(DataError, match=rf"{name}, row 7: '3:' is no "):
        list(source.chunks("train"))
    source = open_source(str(tmp_path / "s.toml"), skip_bad_rows=True)
    assert whole(source).size == 40


def criteo(rows: int, labelled: bool) -> str:
    lines = []
    for n in range(rows):
        integers = ["" if k == 3 else str((n + k) % 9 - 1) for k in range(13)]
        categories = ["" if k == 5 else f"{(n % 4) * 26 + k:08x}" for k in range(26)]
        lines.append("\t".join([*([str(n % 2)] * labelled), *integers, *categories]))
    return "\n".join(lines) + "\n"


def test_rows_of_criteo_are_known_without_a_line_of_names(tmp_path):
    schema, source = opened(tmp_path, "day.txt", criteo(60, labelled=True))
    names = [*(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
    assert schema.header == ("label", *names) and schema.labels == ("label",)
    assert [c.name for c in schema.columns] == names
    assert whole(source).size == 60


@pytest.mark.parametrize(
    ("text", "unlabelled"),
    [
        (LIBSVM, "".join(line.partition(" ")[2] + "\n" for line in LIBSVM.splitlines())),
        (FFM, "".join(line.partition(" ")[2] + "\n" for line in FFM.splitlines())),
        (criteo(60, labelled=True), criteo(60, labelled=False)),
    ],
    ids=["libsvm", "ffm", "criteo"],
)
def test_a_file_without_labels_is_scored_as_the_one_that_has_them(tmp_path, text, unlabelled):
    opened(tmp_path, "a.txt", text)
    (tmp_path / "b.txt").write_text(unlabelled)
    run = str(tmp_path / "run")
    train = ["train", "--data.name", str(tmp_path / "s.toml"), "--batch", "16", "--out", run]
    assert main([*train, "--checkpoint-every", "end", "--model.hidden", "4"]) == 0
    for name in ("a", "b"):
        out = str(tmp_path / f"{name}.csv")
        assert main(["predict", run, "--data", str(tmp_path / f"{name}.txt"), "--out", out]) == 0
    scores = [(tmp_path / f"{name}.csv").read_text() for name in ("a", "b")]
    assert scores[0] == scores[1] and scores[0].count("\n") == text.count("\n") + 1


def test_a_first_line_of_numbers_is_a_row(tmp_path):
    text = "".join(f"{n % 9},{n % 4},{n % 2}\n" for n in range(30))
    schema, source = opened(tmp_path, "a.csv", text)
    assert schema.header == ("c1", "c2", "c3") and whole(source).size == 30
    assert "the names of the columns are made up" in (tmp_path / "s.toml").read_text()
