from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from runtime.data.batch import Batch
from runtime.data.errors import DataError
from runtime.data.ids import hash_integers, tag
from runtime.data.open import open_source
from tests.oracles.reference.initial import hash_text

# Files in the documented formats; every value is made up here.


def both_parts(name: str, data_dir: Path, skip_bad_rows: bool = False) -> dict[str, Batch]:
    source = open_source(name, data_dir, skip_bad_rows=skip_bad_rows)
    return {p: Batch.concat(list(source.chunks(p))) for p in ("train", "test")}


def test_criteo_reads_integers_hex_categories_and_gaps(tmp_path):
    lines = []
    for n in range(50):
        integers = ["" if k == 3 else str(n - 1) for k in range(13)]
        categories = ["" if k == 5 else f"{n * 26 + k:08x}" for k in range(26)]
        lines.append("\t".join([str(n % 2), *integers, *categories]))
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    parts = both_parts("criteo-kaggle", tmp_path)
    test = np.random.default_rng(1).random(50) < 0.2
    assert parts["test"].size == test.sum()
    train = parts["train"]
    kept = np.flatnonzero(~test)
    assert train.labels[:, 0].tolist() == (kept % 2).tolist()
    assert train.dense.shape == (len(kept), 13)
    assert (train.dense[:, 3] == 0).all()
    expected = np.sign(kept - 1) * np.log1p(np.abs(kept - 1))
    assert np.allclose(train.dense[:, 0], expected, atol=1e-6)
    ids = train.ids.reshape(-1, 26)
    assert len(np.unique(ids[:, 5])) == 1
    assert ids[1, 0] == tag(0, np.array([hash_text(f"{kept[1] * 26:08x}")], np.uint64))[0]


def test_avazu_splits_by_day_and_keeps_the_hour_of_day(tmp_path):
    names = (
        "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,"
        "app_category,device_id,device_ip,device_model,device_type,device_conn_type,"
        + ",".join(f"C{n}" for n in range(14, 22))
    )
    rows = [names]
    for n, hour in enumerate((14102900, 14102923, 14103000, 14103023)):
        rows.append(f"1000{n}.0e3,{n % 2},{hour}," + ",".join(f"v{k}" for k in range(21)))
    (tmp_path / "avazu").mkdir()
    (tmp_path / "avazu" / "train.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    parts = both_parts("avazu", tmp_path)
    assert parts["train"].labels[:, 0].tolist() == [0, 1]
    hours = tag(0, hash_integers(np.array([0, 23])))
    for batch in parts.values():
        assert (batch.ids.reshape(2, 22)[:, 0] == hours).all()


def write_taobao(folder: Path) -> None:
    sample = ["user,time_stamp,adgroup_id,pid,nonclk,clk"]
    for n in range(8):
        time = 1_494_604_799 if n < 6 else 1_494_604_800
        sample.append(f"{n % 4},{time},{n % 3},430548_1007,{1 - n % 2},{n % 2}")
    (folder / "raw_sample.csv").write_text("\n".join(sample) + "\n")
    (folder / "user_profile.csv").write_text(
        "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,"
        "occupation,new_user_class_level \n"
        "2,0,5,2,5,,3,0,3\n0,0,5,1,5,2,3,0,\n1,0,4,2,4,,3,0,3\n"
    )
    (folder / "ad_feature.csv").write_text(
        "adgroup_id,cate_id,campaign_id,customer,brand,price\n"
        "1,6406,83237,1,95471,170.0\n0,392,9,2,NULL,1.0\n2,392,9,2,87331,199.0\n"
    )


def test_taobao_joins_users_and_adverts(tmp_path):
    write_taobao(tmp_path)
    source = open_source("taobao-ad", tmp_path)
    names = [f.name for f in source.layout.fields]
    train, test = both_parts("taobao-ad", tmp_path).values()
    assert (train.size, test.size) == (6, 2)
    assert test.labels[:, 0].tolist() == [0, 1]
    prices = np.log1p([1.0, 170.0, 199.0, 1.0, 170.0, 199.0])
    assert np.allclose(train.dense[:, 0], prices)
    ids = train.ids.reshape(6, len(names))

    def texts(name: str, values: list[str]) -> list[int]:
        place = names.index(name)
        return tag(place, np.array([hash_text(v) for v in values], np.uint64)).tolist()

    adverts = ["392", "6406", "392", "392", "6406", "392"]
    assert ids[:, names.index("cate_id")].tolist() == texts("cate_id", adverts)
    brands = ["", "95471", "87331", "", "95471", "87331"]
    assert ids[:, names.index("brand")].tolist() == texts("brand", brands)
    genders = ["1", "2", "2", "", "1", "2"]  # user 3 has no profile
    place = names.index("final_gender_code")
    assert ids[:, place].tolist() == texts("final_gender_code", genders)


def test_a_joined_set_has_one_checksum_of_all_its_files(tmp_path):
    write_taobao(tmp_path)
    before = open_source("taobao-ad", tmp_path).provenance().sha256
    with (tmp_path / "ad_feature.csv").open("a") as file:
        file.write("3,1,1,1,1,1.0\n")
    assert open_source("taobao-ad", tmp_path).provenance().sha256 != before


def test_a_joined_table_with_a_repeated_key_is_refused(tmp_path):
    write_taobao(tmp_path)
    with (tmp_path / "ad_feature.csv").open("a") as file:
        file.write("2,1,1,1,1,1.0\n")
    with pytest.raises(DataError, match="1 rows repeat a value of key column adgroup_id"):
        both_parts("taobao-ad", tmp_path)


def test_a_column_that_no_joined_file_has_is_named(tmp_path):
    write_taobao(tmp_path)
    path = tmp_path / "ad_feature.csv"
    path.write_text(path.read_text().replace("cate_id", "category_id"))
    with pytest.raises(DataError, match=r"neither .*raw_sample\.csv nor its joined tables"):
        both_parts("taobao-ad", tmp_path)


def test_bad_rows_of_a_joined_set_are_counted(tmp_path):
    write_taobao(tmp_path)
    with (tmp_path / "raw_sample.csv").open("a") as file:
        file.write("1,1494604799,0,430548_1007,1,7\n")
    with pytest.raises(DataError, match="row 9, column clk: '7'"):
        both_parts("taobao-ad", tmp_path)
    with (tmp_path / "raw_sample.csv").open("a") as file:
        file.write("1,149460\n")
    with pytest.raises(DataError, match="row 10: Expected 6 columns, got 2: 1,149460"):
        both_parts("taobao-ad", tmp_path)
    source = open_source("taobao-ad", tmp_path, skip_bad_rows=True)
    assert sum(b.size for b in source.chunks("train")) == 6
    assert source.provenance().rows_skipped == 2
