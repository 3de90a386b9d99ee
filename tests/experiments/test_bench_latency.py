"""The table of injected latency: what law 15 predicts, by hand, and what is set beside it."""

from __future__ import annotations

import pytest

from experiments.benching.bench_latency import Case, Options, cases, table
from persia_sim.words.vocabulary import Mode

L, C = 0.020, 0.006


@pytest.mark.parametrize(
    ("mode", "window", "lookahead", "step_s"),
    [
        (Mode.SYNC, 0, "reread", 0.046),  # 2 L + C
        (Mode.LOOKAHEAD, 4, "reread", 0.046),
        (Mode.LOOKAHEAD, 4, "forwarded", 0.0092),  # (2 L + C) / 5
        (Mode.HYBRID, 1, "reread", 0.023),
        (Mode.RAW_HYBRID, 4, "reread", 0.0092),
        (Mode.HYBRID, 16, "reread", 0.006),  # C binds
    ],
)
def test_law_15_by_hand(mode, window, lookahead, step_s):
    assert Case("", mode, window, lookahead, L).predicted_s(C) == pytest.approx(step_s)


def test_every_case_with_latency_has_its_own_mode_without_latency_as_c():
    options = Options(latency_s=(0.01, 0.02), windows=(1, 4))
    everything = cases(options)
    medians = {f"{c.name}, L {c.latency_s:g}": 0.001 * (k + 1) for k, c in enumerate(everything)}
    lines = table(everything, medians)
    assert len(everything) == 3 * (1 + 2 * 4)
    assert len(lines) == 2 * (1 + 2 * 4)
    sync = lines[0]  # C: 1 ms; measured: that of the tenth case
    assert sync == ["sync", "10.00", "1.00", "10.00", "21.00", "0.48"]
    ahead = next(line for line in lines if line[0] == "lookahead forwarded, ahead 4")
    place = [c.name for c in everything].index("lookahead forwarded, ahead 4")
    compute, measured = place + 1, place + 1 + 9
    law = max(compute, (2 * 10 + compute) / 5)
    assert ahead[2:] == [f"{x:.2f}" for x in (compute, measured, law, measured / law)]


@pytest.mark.parametrize("change", [{"latency_s": (0.0,)}, {"windows": ()}, {"window_steps": 2}])
def test_bad_options_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Options(**change)
