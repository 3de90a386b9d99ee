"""The list of faults for the kernels still fits the kernels (`make mutants-kernels` runs it)."""

from __future__ import annotations

from tests.kernel_mutants import ROOT, TESTS, replacements


def test_every_fault_changes_one_place_and_names_tests_that_exist() -> None:
    faults = replacements()
    assert len(faults) >= 40
    for fault in faults:
        assert fault.new != fault.old
        assert fault.tests
        for name in fault.tests:
            assert (ROOT / TESTS / f"test_{name}.py").is_file(), name
