"""The paper, reproduced: every piece run, its claims judged, one page about all of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.catalogue import PIECES, Size, Study, chosen
from experiments.options import Planned
from experiments.tables import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Run what is missing, then write report.html and claims.csv; a failed piece stops no other."""

    size: Size = "quick"
    """quick: under 20 minutes on 2 cores; full: hours."""
    only: tuple[str, ...] = ()
    """These pieces (names of studies); else all."""
    measurements: Path | None = None
    """Folder with rows*.csv, workloads.csv and systems.csv as of `predict-published`; without it
    that piece is left out."""
    store: bool = False
    """Run nothing: copy the finished tables to docs/results and the pictures to paper_figs/out."""

    def check(self) -> None:
        """That the pieces are known, with what they read."""
        for piece in chosen(self.only):
            piece.arguments(self.size, self.measurements)  # names what the folder lacks
        if self.store and self.dry_run:
            raise ValueError("store and dry_run contradict each other; give one of them")


CLAIM_COLUMNS: dict[str, Column] = {
    "claim": "{says}",
    "own plots": lambda claim: claim.plots_verdict.short,
    "independent evidence here": lambda claim: claim.verdict.short,
}


def run(options: Options) -> None:
    """Run the missing pieces, judge the claims, write the page. Raises ValueError on failures."""
    from experiments.kept import sole_writer
    from experiments.paper.claims import claim_records, claims
    from experiments.paper.page import Report, write_report
    from experiments.paper.record import store
    from experiments.paper.run import run_pieces
    from experiments.tables import table, write_csv

    plan, left_out = planned(options)
    if options.dry_run:
        print(_plan(plan, left_out, options))
        return
    with sole_writer(options.out):
        if options.store:
            names = store(list(plan), options.out)
            print(f"stored {len(names)} tables: {', '.join(names)}")
            return
        asked = {piece: plan[piece] for piece in chosen(options.only) if piece in plan}
        failed = run_pieces(asked, options.size, options.out)
        found = claims(options.out)
        write_csv(options.out / "claims.csv", claim_records(found))
        report = Report(
            size=options.size,
            out=options.out,
            plan=plan,
            left_out=left_out,
            failed=failed,
            claims=found,
        )
        path = write_report(report, options.out / "report.html")
    print(table(found, CLAIM_COLUMNS))
    print(f"claims: {options.out / 'claims.csv'}\nreport: {path}")
    if failed:
        names = ", ".join(piece.name for piece in failed)
        raise ValueError(
            f"{len(failed)} of {len(asked)} pieces failed ({names}); the report shows their last"
            " lines, and a second run does only these"
        )


def planned(options: Options) -> tuple[dict[Study, tuple[str, ...]], dict[Study, str]]:
    """The pieces of a report with their arguments, and the others with the reason."""
    plan, left_out = {}, {}
    for piece in PIECES:
        own = piece.arguments(options.size, options.measurements)
        if own is not None:
            plan[piece] = own
        else:
            left_out[piece] = "it predicts measurements; name their folder with --measurements"
    return plan, left_out


def _plan(plan: dict[Study, tuple[str, ...]], left_out: dict[Study, str], options: Options) -> str:
    from experiments.paper.record import command
    from experiments.paper.run import missing

    asked = {piece: plan[piece] for piece in chosen(options.only) if piece in plan}
    waiting = missing(asked, options.out)
    lines = [
        f"  {'to run' if piece in waiting else 'done':<7}"
        f" {piece.minutes_of(options.size):5.1f} min  {command(piece.name, own)}"
        for piece, own in asked.items()
    ]
    lines += [f"  left out: {piece.name}: {why}" for piece, why in left_out.items()]
    total = sum(piece.share_of_time(options.size) for piece in waiting)
    head = f"{len(asked)} pieces, {len(waiting)} to run, some {total:.0f} minutes on 2 cores"
    return "\n".join([f"{head}; results in {options.out}", *lines])
