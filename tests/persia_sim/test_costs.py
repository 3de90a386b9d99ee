"""Cost laws, measured profiles, and the flags that they raise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from persia_sim.model.costs import Law, with_profile
from persia_sim.model.demand import demand
from persia_sim.presets.catalogue import CATALOGUE
from tests.persia_sim.sim_configurations import small_scenario

PROFILE = {
    "schema": 1,
    "source": "bench of 2026-01-01",
    "laws": {
        "server_lookup": {
            "fixed_s": 1e-5, "per_item_s": 2e-7, "spread": 0.05, "fitted_items": [10, 100]
        }
    },
    "gpu": {"fixed_s": 1e-3, "efficiency": [[64, 0.1], [512, 0.3]]},
}  # fmt: skip


def write(path: Path, profile: object) -> Path:
    path.write_text(json.dumps(profile))
    return path


def test_a_profile_replaces_laws_and_says_so(tmp_path: Path) -> None:
    costs = with_profile(CATALOGUE, write(tmp_path / "profile.json", PROFILE))
    assert costs.server_lookup(100.0) == pytest.approx(3e-5)
    assert costs.gpu_fixed_s == 1e-3 and costs.efficiency(512) == 0.3
    assert costs.server_update == CATALOGUE.server_update
    assert "bench of 2026-01-01" in costs.source


def test_use_outside_the_fitted_range_is_flagged(tmp_path: Path) -> None:
    costs = with_profile(CATALOGUE, write(tmp_path / "profile.json", PROFILE))
    far = replace(small_scenario(), costs=costs)
    assert demand(far).extrapolated == ("server_lookup",)
    assert demand(small_scenario()).extrapolated == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema is 2: must be 1"),
        ({"lawz": {}}, "unknown lawz"),
        ({"laws": {"lookup": {}}}, "unknown lookup in laws"),
        ({"laws": {"load": {"slope": 1}}}, "unknown slope in law load"),
        ({"laws": {"load": {"fixed_s": -1}}}, "fixed_s is -1: must be >= 0"),
        ({"gpu": {"speed": 1}}, "unknown speed in gpu"),
    ],
)
def test_a_wrong_profile_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        with_profile(CATALOGUE, write(tmp_path / "profile.json", PROFILE | change))


def test_a_missing_or_broken_profile_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; write it with"):
        with_profile(CATALOGUE, tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        with_profile(CATALOGUE, tmp_path / "bad.json")


def test_every_constant_has_a_source() -> None:
    for name in CATALOGUE.__slots__:
        law = getattr(CATALOGUE, name)
        if isinstance(law, Law):
            assert law.source, name
