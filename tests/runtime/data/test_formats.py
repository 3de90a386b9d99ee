"""Files of other libraries: guessed, trained on, and scored without their labels."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.__main__ import main
from runtime.data.batch import Batch
from runtime.data.errors import DataError
from runtime.data.ids import hash_integers, hash_texts, tag
from runtime.data.open import open_source
from runtime.data.schema import read_schema
from runtime.preparing.guess import guessed

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
LETOR = "".join(
    f"{n % 3} qid:{n // 6 + 1} 1:{n % 10 / 10} 3:0.5 46:{n % 7} # doc {n}: # {n}\n"
    for n in range(240)
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


def test_a_line_of_a_query_is_grouped_by_it_and_no_query_is_divided(tmp_path):
    """As LETOR, SVMrank and xgboost write them, with the document behind a #."""
    schema, source = opened(tmp_path, "letor.txt", "# by hand\n" + LETOR)
    assert schema.group == "qid" and "qid" not in schema.feature_columns
    assert schema.regression == ("label",)
    queries = {part: layout_groups(source, part) for part in ("train", "test")}
    assert not queries["train"] & queries["test"]
    assert len(queries["train"] | queries["test"]) == 40 and 3 < len(queries["test"]) < 15
    assert whole(source).size == 240


def layout_groups(source, part):
    groups = [source.layout.groups(chunk) for chunk in source.chunks(part)]
    return set(np.concatenate(groups).tolist())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1 3:", "'1 3:'"), ("1:0.5 2:1", "a label that is not known is 0"),
        ("1 2:1 2:1", "sorted and unique; got"), ("1 3:1 2:1", "sorted and unique; got"),
        ("1 x:1", "'1 x:1'"), ("1 -1:1", "'1 -1:1'"),
    ],
)  # fmt: skip
def test_a_line_that_is_none_of_the_format_is_told_by_its_number(tmp_path, line, told):
    _, source = opened(tmp_path, "a.txt", LIBSVM)
    lines = LIBSVM.splitlines()
    (tmp_path / "a.txt").write_text("\n".join([*lines[:6], line, *lines[6:]]))
    source = open_source(str(tmp_path / "s.toml"))
    with pytest.raises(DataError, match=r"a\.txt, row 7: ") as caught:
        list(source.chunks("train"))
    assert told in str(caught.value) and "--data.skip-bad-rows" in str(caught.value)
    source = open_source(str(tmp_path / "s.toml"), skip_bad_rows=True)
    assert whole(source).size == 40


def test_a_line_without_the_query_that_groups_is_bad(tmp_path):
    _, source = opened(tmp_path, "a.txt", LETOR)
    (tmp_path / "a.txt").write_text(LETOR.replace(" qid:3 ", " ", 1))
    source = open_source(str(tmp_path / "s.toml"))
    with pytest.raises(DataError, match=r"row 13: it has no qid:"):
        list(source.chunks("train"))


def test_a_file_of_libffm_is_told_what_to_do(tmp_path):
    (tmp_path / "a.ffm").write_text("1 0:3:1 1:10:0.5\n")
    with pytest.raises(DataError, match=r"libffm.*docs/training\.md"):
        guessed(tmp_path / "a.ffm")


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


def test_a_file_without_labels_is_scored_as_the_one_that_has_them(tmp_path):
    text, unlabelled = criteo(60, labelled=True), criteo(60, labelled=False)
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
