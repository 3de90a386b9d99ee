"""A checkpoint whose manifest or files are not as they were written is refused in one sentence."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from runtime.checkpoint.rows import load
from runtime.checkpoint.shard import read_manifest
from runtime.data.batch import Field, Layout
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.embedding.native.store import NativeStore
from runtime.files import BrokenFileError, read_arrays
from tests.runtime.embedding.conftest import save


@pytest.fixture
def saved(one_table: Any, tmp_path: Path) -> Path:
    """Of two shards."""
    table = one_table(dim=2, shards=2)
    table.look_up(np.arange(70))
    save(table.store, tmp_path)
    return tmp_path


def loaded(one_table: Any, folder: Path) -> Any:
    table = one_table(dim=2, shards=2)
    load(table.store, folder)
    return table


def sign(folder: Path, content: Any) -> None:
    """Write a manifest with the digest that belongs to it, as somebody who knows how would."""
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(plain.encode(), digest_size=32).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content | {"digest": digest}))


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    del content["digest"]
    return content


def test_a_whole_checkpoint_loads_and_so_does_one_signed_again(one_table, saved):
    assert loaded(one_table, saved).resident() == set(range(70))
    sign(saved, content_of(saved))
    assert loaded(one_table, saved).resident() == set(range(70))


def test_files_that_are_swapped_copied_or_missing_are_refused(one_table, saved):
    one, two = (saved / name for name in read_manifest(saved).files)
    whole = one.read_bytes(), two.read_bytes()
    for first, second in [(whole[1], whole[0]), (whole[0], whole[0])]:
        one.write_bytes(first)
        two.write_bytes(second)
        with pytest.raises(BrokenFileError, match=r"-shard-000[01]\.rows .*not the file that the"):
            loaded(one_table, saved)
    one.write_bytes(whole[0])
    two.unlink()
    with pytest.raises(BrokenFileError, match=r"shard-0001\.rows cannot be read: No such file"):
        loaded(one_table, saved)
    os.mkfifo(two)
    with pytest.raises(BrokenFileError, match="it is not a regular file"):
        loaded(one_table, saved)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("digests", [], r"digests is \[\]: must be one for each shard"),
        ("digests", None, "digests must be a list, got None"),
        ("digests", [1, 2], r"digests\[0\] must be text, got 1"),
        ("name", "../../etc/pass", "name is .*: must be 12 hex digits"),
        ("seed", "0", "seed must be a whole number, got '0'"),
        ("seed", None, "seed must be a whole number, got None"),
        ("seed", float("inf"), "Infinity is not a finite number"),
        ("tables", ["rows"], "tables must be a table of names and values"),
        ("tables", {"rows": None}, "tables.rows must be a table of names and values, got None"),
        ("format", "persia-testbed-embedding-2", "is not the manifest of an embedding checkpoint"),
        ("more", 1, "more is not known"),
    ],
)
def test_a_manifest_of_another_shape_names_key_value_and_rule(
    one_table, saved, key, value, message
):
    sign(saved, content_of(saved) | {key: value})
    with pytest.raises(BrokenFileError, match=rf"manifest\.json.* {message}"):
        loaded(one_table, saved)


def test_shards_listed_twice_or_in_another_order_are_refused(one_table, saved):
    whole = content_of(saved)
    first, second = whole["digests"]
    for digests, message in [
        ([first, first], "must be one for each shard, all different"),
        ([second, first], "not the file that the checkpoint names"),
    ]:
        sign(saved, whole | {"digests": digests})
        with pytest.raises(BrokenFileError, match=message):
            loaded(one_table, saved)


def test_any_change_without_the_digest_is_noticed(one_table, saved):
    """Also those that have the right shape: the order of shards, a seed."""
    file, text = saved / "manifest.json", (saved / "manifest.json").read_text()
    whole = json.loads(text)
    for change in ({"digests": whole["digests"][::-1]}, {"seed": 1}):
        file.write_text(json.dumps(whole | change))
        with pytest.raises(BrokenFileError, match="its digest does not match its content"):
            loaded(one_table, saved)
    for damage in (text[:-20], "[" * 100_000, "null", "[]", "\x00"):
        file.write_text(damage)
        with pytest.raises(BrokenFileError, match=r"manifest\.json is (damaged|not)"):
            loaded(one_table, saved)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    where=st.sampled_from(
        [("digests",), ("seed",), ("tables",), ("digests", 0), ("tables", "rows")]
    ),
    value=VALUES,
)
@example(where=("tables",), value={"\x1e": None})  # breaks a line
def test_any_other_value_of_a_key_is_one_sentence(one_table, saved, where, value):
    whole = (saved / "manifest.json").read_text()
    content = content_of(saved)
    assume(not (where == ("seed",) and type(value) is int and value == 0))  # the one it has
    *path, last = where
    inner = content
    for step in path:
        inner = inner[step]
    inner[last] = value
    try:
        sign(saved, content)
        with pytest.raises(ValueError) as refused:
            loaded(one_table, saved)
        assert len(str(refused.value).splitlines()) == 1
        assert str(saved) in str(refused.value)
    finally:
        (saved / "manifest.json").write_text(whole)


@pytest.mark.parametrize(
    "shape", [[2**40], [2**70], [-1], [1.5], ["9"], None, 7, [3, -3], [2**31, 2**31]]
)
def test_a_damaged_header_asks_for_no_memory(saved, tmp_path, shape):
    header = json.dumps({"facts": {}, "arrays": {"a": ["<u8", shape]}}).encode()
    start = b"PERSIA-TESTBED-ARRAYS-2\n" + struct.pack("<Q", len(header)) + header
    body = start + bytes(64)
    file = tmp_path / "x.rows"
    file.write_bytes(body + hashlib.blake2b(body, digest_size=32).digest())
    with pytest.raises(BrokenFileError, match=r"x\.rows (is truncated|has a damaged header)"):
        read_arrays(file, "")


def test_what_is_in_the_checkpoint_and_what_in_the_store_is_said(tmp_path):
    def store(*names, **config) -> NativeStore:
        fields = tuple(Field(name=n, table=n) for n in names)
        return NativeStore(Layout(fields=fields), [TableConfig(name=n, **config) for n in names])

    save(store("a", "b"), tmp_path)
    load(store("b", "a"), tmp_path)  # the order of tables says nothing
    for names in (("a",), ("a", "b", "c"), ("a", "x")):
        said = f"holds the tables a, b, the store has {', '.join(names)}; open the store"
        with pytest.raises(ValueError, match=said):
            load(store(*names), tmp_path)
    for config, said in [
        ({"initial_scale": 0.5}, "a was saved with initial_scale=0.01, the store has initial_sc"),
        ({"initial": "normal"}, "initial=uniform, the store has initial=normal"),
        ({"optimizer": RowOptimizer(initial_accumulator=0.1)}, "accumulator=0.0, the store has"),
        (
            {"optimizer": RowOptimizer(kind="sgd")},
            "kind=rowwise_adagrad, the store has optimizer.kind",
        ),
        ({"dim": 4}, "dim=8, the store has dim=4"),
    ]:
        with pytest.raises(ValueError, match=said):
            load(store("a", "b", **config), tmp_path)
    load(store("a", "b", optimizer=RowOptimizer(lr=0.5)), tmp_path)


def test_a_folder_that_is_none_and_a_copy_of_a_checkpoint(one_table, saved):
    with pytest.raises(BrokenFileError, match="holds no checkpoint: it is not a folder"):
        loaded(one_table, saved / "nowhere")
    shutil.copytree(saved, saved / "copy")
    assert loaded(one_table, saved / "copy").resident() == set(range(70))
    (saved / "manifest.json").unlink()
    os.mkfifo(saved / "manifest.json")  # reading it would wait for ever
    with pytest.raises(BrokenFileError, match=r"json cannot be read: it is not a regular"):
        loaded(one_table, saved)
