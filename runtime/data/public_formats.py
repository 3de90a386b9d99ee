"""The public advertising logs in their publishers' own formats. Untested on the real files.

Written from the public documentation named in each docstring; the tests use small files made in
that format. Put the files, unpacked or as .gz, in DATA_DIR/NAME.
"""

from __future__ import annotations

from runtime.data.schema import Column, Join, Schema, Split, named


def criteo_kaggle() -> Schema:
    """Criteo Display Advertising Challenge (Kaggle, 2014). Untested on the real files.

    ``train.txt``: no header; tab between a label, 13 integer and 26 categorical features (32-bit
    hashes in hex); an empty entry is a missing value; rows in time order over 7 days. Source: the
    readme.txt of the archive "dac". The split is a random fifth, as the benchmarks on it do.
    """
    integers = tuple(f"I{n}" for n in range(1, 14))
    categories = tuple(f"C{n}" for n in range(1, 27))
    return Schema(
        name="criteo-kaggle",
        file="train.txt",
        delimiter="\t",
        header=("label", *integers, *categories),
        columns=(
            *(Column(name=name, kind="numeric", fill=0.0) for name in integers),
            *(Column(name=name) for name in categories),
        ),
        tasks=("click",),
        split=Split(test_fraction=0.2, random_seed=1),
        missing=("",),
    )


def avazu() -> Schema:
    """Avazu click-through rate prediction (Kaggle, 2014). Untested on the real files.

    ``train.gz``: CSV with header ``id,click,hour,C1,banner_pos,site_id,...,C21``; ``hour`` is
    yymmddhh, 21 to 30 October 2014; all features are categorical. Source: the competition's data
    page (kaggle.com/c/avazu-ctr-prediction/data). ``id`` numbers the rows and is left out; of
    ``hour`` only the hour of day is a feature, since the last day is the test part.
    """
    plain = named(
        "C1 banner_pos site_id site_domain site_category app_id app_domain app_category "
        "device_id device_ip device_model device_type device_conn_type"
    )
    return Schema(
        name="avazu",
        file="train.gz",
        columns=(
            Column(name="hour", modulo=100),
            *plain,
            *(Column(name=f"C{n}") for n in range(14, 22)),
        ),
        labels=("click",),
        split=Split(column="hour", test_from=14103000),
        missing=("",),
    )


def taobao_ad() -> Schema:
    """Taobao display advertising ("Ali_Display_Ad_Click"). Untested on the real files.

    ``raw_sample.csv`` (user, time_stamp, adgroup_id, pid, nonclk, clk; 26 million rows, 6 to 13
    May 2017) joined with ``user_profile.csv`` (by userid) and ``ad_feature.csv`` (by adgroup_id);
    the big file streams, the two small ones (about a million rows each) stay in memory. A missing
    brand is written NULL; one column name of the profile ends in a blank. Source: the data set's
    page, tianchi.aliyun.com/dataset/56. The last day (from midnight in Beijing, UTC+8) is the test
    part. ``nonclk`` is 1 - ``clk``.
    """
    profile = named(
        "cms_segid cms_group_id final_gender_code age_level pvalue_level shopping_level occupation"
    )
    advert = named("cate_id campaign_id customer brand")
    return Schema(
        name="taobao-ad",
        file="raw_sample.csv",
        joins=(
            Join(file="user_profile.csv", left="user", right="userid"),
            Join(file="ad_feature.csv", left="adgroup_id", right="adgroup_id"),
        ),
        columns=(
            *named("user adgroup_id pid"),
            *profile,
            Column(name="new_user_class_level "),
            *advert,
            Column(name="price", kind="numeric", fill=0.0),
        ),
        labels=("clk",),
        tasks=("click",),
        split=Split(column="time_stamp", test_from=1_494_604_800),
        missing=("", "NULL"),
    )
