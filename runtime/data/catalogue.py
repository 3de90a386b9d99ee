"""Ready schemas of public data sets that people may have on disk; no rows are shipped.

What is left out, and why: columns known only after the event, times that the split is made of,
and survey weights. Facts of each set are from its publisher's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from runtime.data.bars import avazu_x1, criteo_x1, criteo_x4
from runtime.data.public_formats import avazu, criteo_kaggle, taobao_ad
from runtime.data.schema import Column, Schema, Split, named


def kuairand_pure_14d() -> Schema:
    """Impressions of a short-video app, 25 April to 8 May 2022 (Gao et al., CIKM 2022), by time.

    222,444 rows, two behaviours: click and long view. CC BY-SA 4.0.
    """
    plain = named(
        "hour tab user video author music music_type video_type upload_dt upload_type frame "
        "user_active_degree is_lowactive_period is_live_streamer is_video_author "
        "follow_user_num_range fans_user_num_range friend_user_num_range register_days_range"
    )
    return Schema(
        name="kuairand-pure-14d",
        columns=(
            *plain,
            *(Column(name=f"onehot_feat{n}") for n in range(18)),
            Column(name="tag", kind="multi", pooling="mean"),
            Column(name="duration_ms", kind="bucket"),
        ),
        labels=("label", "long_view"),
        tasks=("click", "long_view"),
        group="user",
        split=Split(column="date", test_from=20220505),
    )


def kuairand_pure() -> Schema:
    """The whole KuaiRand-Pure standard-policy log, 8 April to 8 May 2022; split as the 14 days."""
    return replace(kuairand_pure_14d(), name="kuairand-pure")


def kuairand_1k() -> Schema:
    """KuaiRand-1K: all that 1,000 users saw, 11.7 million impressions over 4.4 million videos."""
    return replace(kuairand_pure_14d(), name="kuairand-1k")


def adult() -> Schema:
    """Adult / Census Income (Becker, Kohavi 1996, UCI): income over 50K; parts as published.

    48,842 rows. fnlwgt is a survey weight, education_num repeats education. CC BY 4.0.
    """
    plain = named(
        "age workclass education marital_status occupation relationship race sex "
        "hours_per_week native_country"
    )
    return Schema(
        name="adult",
        columns=(*plain, *_buckets("capital_gain", "capital_loss")),
        split=Split(column="part", test_equals="test"),
    )


def adult_uci() -> Schema:
    """Adult as fetched from its publisher."""
    return replace(adult(), name="adult-uci")


def census_income_kdd() -> Schema:
    """Census-Income (KDD): US census extracts of 1994-95 (Lane, Kohavi, UCI); parts as published.

    299,285 rows, 6 % positive. instance_weight is a survey weight. CC BY 4.0.
    """
    plain = named(
        "age class_worker det_ind_code det_occ_code education hs_college marital_stat "
        "major_ind_code major_occ_code race hisp_origin sex union_member unemp_reason "
        "full_or_part_emp tax_filer_stat region_prev_res state_prev_res det_hh_fam_stat "
        "det_hh_summ mig_chg_msa mig_chg_reg mig_move_reg mig_same mig_prev_sunbelt num_emp "
        "fam_under_18 country_father country_mother country_self citizenship own_or_self "
        "vet_question vet_benefits weeks_worked year"
    )
    money = ("wage_per_hour", "capital_gains", "capital_losses", "stock_dividends")
    return Schema(
        name="census-income-kdd",
        columns=(*plain, *_buckets(*money)),
        split=Split(column="part", test_equals="test"),
    )


def nycflights13() -> Schema:
    """Flights from New York City in 2013: late by more than 15 minutes; random 80/20.

    327,346 rows (US Bureau of Transportation Statistics, compiled by H. Wickham). CC0.
    """
    plain = named("month day dow sched_hour sched_q carrier flight tailnum origin dest distance")
    return Schema(
        name="nycflights13",
        columns=plain,
        split=Split(test_fraction=0.2, random_seed=1),
    )


def nycflights13_time() -> Schema:
    """The same flights, the last fifth of the year as test: a study of drift."""
    return replace(
        nycflights13(),
        name="nycflights13-time",
        folder="nycflights13",
        split=Split(test_fraction=0.2),
    )


def tennis() -> Schema:
    """Tennis matches 1967 to 2024 (J. Sackmann, Tennis Abstract): does player A win; by time.

    1,501,327 rows. A player's number is only unique within a tour. CC BY-NC-SA 4.0.
    """
    sides: list[Column] = []
    for side in ("a", "b"):
        sides.append(Column(name=f"{side}_id", with_column="tour"))
        sides += named(f"{side}_hand {side}_ioc {side}_age")
        sides.append(Column(name=f"{side}_rank", kind="bucket", buckets_per_e=4.0))
        sides += named(f"{side}_seed {side}_entry")
    match = named("tour level tourney surface round best_of")
    return Schema(
        name="tennis",
        columns=(*match, *sides),
        split=Split(test_fraction=0.1),
    )


def tennis_random() -> Schema:
    """The same matches, a random tenth as test: no drift between the parts."""
    return replace(
        tennis(),
        name="tennis-random",
        folder="tennis",
        split=Split(test_fraction=0.1, random_seed=1),
    )


def _buckets(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name=name, kind="bucket") for name in names)


CATALOGUE: dict[str, Callable[[], Schema]] = {
    "kuairand-pure-14d": kuairand_pure_14d,
    "kuairand-pure": kuairand_pure,
    "kuairand-1k": kuairand_1k,
    "adult": adult,
    "adult-uci": adult_uci,
    "census-income-kdd": census_income_kdd,
    "nycflights13": nycflights13,
    "nycflights13-time": nycflights13_time,
    "tennis": tennis,
    "tennis-random": tennis_random,
    "criteo-kaggle": criteo_kaggle,
    "avazu": avazu,
    "taobao-ad": taobao_ad,
    "criteo_x1": criteo_x1,
    "avazu_x1": avazu_x1,
    "criteo_x4": criteo_x4,
}
"""Every ready schema by name."""
