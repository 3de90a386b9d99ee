"""Splits of public data by their ids in BARS, with the checksums that make a split the same one.

BARS (Zhu et al., CIKM 2021 and SIGIR 2022; github.com/reczoo/BARS) publishes test AUCs of many
models on fixed files; who has these files stands beside those figures. Put train.csv, valid.csv
and test.csv into DATA_DIR/NAME. Written from the repository's data pages and logs; never run on the
real files.
"""

from __future__ import annotations

from runtime.data.schema import Column, Schema, Split, named

_SPLIT = Split(validation_file="valid.csv", test_file="test.csv")
_INTEGERS = tuple(f"I{n}" for n in range(1, 14))
_CATEGORIES = named(" ".join(f"C{n}" for n in range(1, 27)))


def criteo_x1() -> Schema:
    """criteo_x1: Criteo's display ads in the split of AFN, 7:2:1. Untested on the real files.

    33,003,326, 8,250,124 and 4,587,167 rows; 13 numbers that are scaled already, 26 categories.
    """
    return Schema(
        name="criteo_x1",
        file="train.csv",
        columns=(*(Column(name=n, kind="numeric", log=False) for n in _INTEGERS), *_CATEGORIES),
        tasks=("click",),
        split=_SPLIT,
        md5=(
            "30b89c1c7213013b92df52ec44f52dc5",
            "f73c71fb3c4f66b6ebdfa032646bea72",
            "2c48b26e84c04a69b948082edae46f8c",
        ),
    )


def avazu_x1() -> Schema:
    """avazu_x1: Avazu's mobile ads in the split of AFN, 7:1:2. Untested on the real files.

    22 categories, called feat_1 to feat_22.
    """
    return Schema(
        name="avazu_x1",
        file="train.csv",
        columns=named(" ".join(f"feat_{n}" for n in range(1, 23))),
        tasks=("click",),
        split=_SPLIT,
        md5=(
            "f1114a07aea9e996842c71648e0f6395",
            "d9568f246357d156c4b8030fadb8b623",
            "9e2fe9c48705c9315ae7a0953eb57acf",
        ),
    )


def criteo_x4() -> Schema:
    """criteo_x4: Criteo's display ads in the split of AutoInt, 8:1:1. Untested on the real files.

    36,672,493, 4,584,062 and 4,584,062 rows; the 13 integers become ids of buckets, as in BARS.
    """
    return Schema(
        name="criteo_x4",
        file="train.csv",
        columns=(*(Column(name=name, kind="bucket") for name in _INTEGERS), *_CATEGORIES),
        labels=("Label",),
        tasks=("click",),
        split=_SPLIT,
        missing=("",),
        md5=(
            "4a53bb7cbc0e4ee25f9d6a73ed824b1a",
            "fba5428b22895016e790e2dec623cb56",
            "cfc37da0d75c4d2d8778e76997df2976",
        ),
    )
