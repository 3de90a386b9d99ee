"""Data sets as their publishers offer them, and how their files become one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from persia_sim.words.schema import nearest
from runtime.data.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One downloadable data set."""

    name: str
    """Of the catalogue."""
    url: str
    """The publisher's archive."""
    members: tuple[str, ...]
    """File names inside the archive that are needed, without their folders."""
    to_table: Callable[[Path], Any]
    """From the folder with the members to a pyarrow.Table in the catalogue's layout."""
    terms: str
    """Licence and whom to cite."""
    sha256: str | None = None
    """Of the archive, once known; None: the first download on a machine decides."""


def publication(name: str) -> Publication:
    """A downloadable data set by name."""
    known = {p.name: p for p in PUBLICATIONS}
    if name not in known:
        raise DataError(
            f"no download is called {name!r}; {nearest(name, known)}\n"
            "  other data sets have terms to accept on their publishers' pages: put their files in "
            "a folder and give it as the data directory"
        )
    return known[name]


def _words(names: str) -> list[str]:
    return names.split()


class _KuaiRand(NamedTuple):
    """Names of the files of one of the publisher's versions."""

    logs: tuple[str, ...]
    users: str
    videos: str


def _kuairand(version: str) -> _KuaiRand:
    weeks = "4_08_to_4_21", "4_22_to_5_08"
    return _KuaiRand(
        tuple(f"log_standard_{week}_{version}.csv" for week in weeks),
        f"user_features_{version}.csv",
        f"video_features_basic_{version}.csv",
    )


_PURE, _1K = _kuairand("pure"), _kuairand("1k")
_USER_TEXTS = (
    "user_active_degree",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
)
_USER_NUMBERS = (
    "is_lowactive_period",
    "is_live_streamer",
    "is_video_author",
    *(f"onehot_feat{n}" for n in range(18)),
)


def kuairand_table(folder: Path, files: _KuaiRand = _PURE) -> Any:
    """The two standard-policy logs in time order, with user and video features.

    Columns as documented at github.com/chongminggao/KuaiRand. Repeats of (user, video, time) are
    dropped; an absent number becomes -1 (of music: 0), an absent text stays absent. What is known
    only after the impression, and statistics over the whole period, are left out.
    """
    import pandas as pd
    import pyarrow as pa

    wanted = _words("user_id video_id date hourmin time_ms is_click long_view duration_ms tab")
    log = pd.concat([_csv(folder / name, wanted) for name in files.logs])
    log = log.drop_duplicates(["user_id", "video_id", "time_ms"])
    log = log.sort_values("time_ms", kind="stable")
    users = _csv(folder / files.users, ["user_id", *_USER_TEXTS, *_USER_NUMBERS])
    wanted = _words(
        "video_id author_id video_type upload_dt upload_type server_width server_height "
        "music_id music_type tag"
    )
    videos = _csv(folder / files.videos, wanted)
    frame = _whole(videos["server_width"]).astype(str) + "x"
    videos["frame"] = frame + _whole(videos["server_height"]).astype(str)

    user = users.set_index("user_id").reindex(log["user_id"])
    video = videos.set_index("video_id").reindex(log["video_id"])
    columns: dict[str, Any] = {
        "label": _whole(log["is_click"]),
        "long_view": _whole(log["long_view"]),
        "date": _whole(log["date"]),
        "time_ms": _whole(log["time_ms"]),
        "hour": _whole(log["hourmin"]) // 100,
        "tab": _whole(log["tab"]),
        "user": _whole(log["user_id"]),
        "video": _whole(log["video_id"]),
        "author": _whole(video["author_id"]),
        "music": _whole(video["music_id"], absent=0),
        "music_type": _whole(video["music_type"]),
        "duration_ms": _whole(log["duration_ms"]),
    }
    columns |= {name: video[name] for name in ("tag", "video_type", "upload_dt", "upload_type")}
    columns["frame"] = video["frame"]
    columns |= {name: user[name] for name in _USER_TEXTS}
    columns |= {name: _whole(user[name]) for name in _USER_NUMBERS}
    return pa.table({name: pa.array(c.to_numpy(), from_pandas=True) for name, c in columns.items()})


_ADULT_COLUMNS = _words(
    "age workclass fnlwgt education education_num marital_status occupation relationship race sex "
    "capital_gain capital_loss hours_per_week native_country"
)


def adult_table(folder: Path) -> Any:
    """adult.data, then adult.test; a column ``part`` says which. Columns as in adult.names.

    Lines hold 14 features and the income class, separated by a comma and a blank; the test file
    begins with a remark and ends its classes with a full stop.
    """
    import pandas as pd
    import pyarrow as pa

    tables = []
    for part, name in (("train", "adult.data"), ("test", "adult.test")):
        text = pd.read_csv(
            folder / name,
            header=None,
            names=[*_ADULT_COLUMNS, "income"],
            skipinitialspace=True,
            keep_default_na=False,
            comment="|",
        )
        income = text.pop("income").str.rstrip(".")
        unknown = sorted(set(income) - {">50K", "<=50K"})
        if unknown:
            raise DataError(f"{folder / name}: income must be >50K or <=50K, got {unknown[:3]}")
        text.insert(0, "label", (income == ">50K").astype("int8"))
        text.insert(1, "part", part)
        tables.append(text)
    return pa.Table.from_pandas(pd.concat(tables), preserve_index=False)


def _csv(path: Path, columns: list[str]) -> Any:
    import pandas as pd

    try:
        return pd.read_csv(path, usecols=columns)
    except ValueError as error:
        raise DataError(f"{path.name} of the archive is not as documented: {error}") from error


def _whole(column: Any, absent: int = -1) -> Any:
    """A column of whole numbers; the publisher's files hold some as 1.0, and gaps."""
    return column.fillna(absent).astype("int64")


PUBLICATIONS = (
    Publication(
        name="kuairand-pure",
        url="https://zenodo.org/records/10439422/files/KuaiRand-Pure.tar.gz",
        members=(*_PURE.logs, _PURE.users, _PURE.videos),
        to_table=kuairand_table,
        terms="CC BY-SA 4.0; cite C. Gao et al., KuaiRand, CIKM 2022 (kuairand.com)",
    ),
    Publication(
        name="kuairand-1k",
        url="https://zenodo.org/records/10439422/files/KuaiRand-1K.tar.gz",
        members=(*_1K.logs, _1K.users, _1K.videos),
        to_table=partial(kuairand_table, files=_1K),
        terms="CC BY-SA 4.0; cite C. Gao et al., KuaiRand, CIKM 2022 (kuairand.com)",
    ),
    Publication(
        name="adult-uci",
        url="https://archive.ics.uci.edu/static/public/2/adult.zip",
        members=("adult.data", "adult.test"),
        to_table=adult_table,
        terms="CC BY 4.0; cite B. Becker, R. Kohavi, Adult, UCI repository, 1996",
    ),
)
"""What ``data get`` offers."""
