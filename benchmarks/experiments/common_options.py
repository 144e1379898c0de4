"""The options that all figures' commands share: each one's text and type here, its place in every command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.origin import write_results
from protocol.console import out
from protocol.places import picture_file

if TYPE_CHECKING:
    from benchmarks.experiments.results import Options, Result


class AccountingChoice(StrEnum):
    """Whose accounting: see benchmarks/experiments/README.md."""

    PAPER = "paper"
    ARTIFACT = "artifact"


class WorkloadChoice(StrEnum):
    """Where bounds on the bias are tried: see benchmarks/experiments/README.md."""

    MICROBENCHMARK = "microbenchmark"
    PATCG = "patcg"
    CRITEO = "criteo"


Accounting = Annotated[AccountingChoice, typer.Option(help="The paper's accounting, or its public artifact's.")]
Kappa = Annotated[float, typer.Option(help="Weight of the bias side query, in the value's unit; 0 is off.")]
EpochDays = Annotated[int | None, typer.Option(help="Length of an epoch in days.", show_default="7, or all")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the workload.")]
Scale = Annotated[float, typer.Option(help="Size of the workload, above 0 and at most 1.")]
Policy = Annotated[
    list[str] | None, typer.Option("--policy", metavar="MODULE:CLASS", help="A policy of your own beside the three.")
]
Function = Annotated[
    list[str] | None,
    typer.Option(
        "--function",
        metavar="NAME",
        help="Also run real devices with this attribution function: last, first, equal, last-n, slots, or your own "
        "as module:function.",
    ),
]


@dataclass(frozen=True, slots=True)
class Common:
    """How large the workload is, how long its epochs are, and where the results go."""

    epoch_days: int | None
    seed: int
    scale: float
    json: Path | None
    plot: Path | None

    def options(
        self,
        accounting: AccountingChoice,
        kappa: float,
        policies_named: Sequence[str] | None = None,
        functions: Sequence[str] | None = None,
    ) -> Options:
        """What the experiment is told."""
        from benchmarks.experiments import policies
        from benchmarks.experiments.results import Options

        days = 7 if self.epoch_days is None else self.epoch_days
        chosen = Options(policies.Accounting(accounting.value), kappa, days, self.seed, self.scale)
        if not (policies_named or functions):
            return chosen
        from benchmarks.experiments.own_policy import own_policies

        return replace(chosen, own=own_policies(policies_named or (), functions or ()))

    def lengths(self) -> tuple[int, ...]:
        """The epochs' lengths for a figure that compares several: all of them, unless one was asked for."""
        from benchmarks.experiments.experiments import EPOCH_LENGTHS

        return EPOCH_LENGTHS if self.epoch_days is None else (self.epoch_days,)

    def draw(self, figure: str, result: Result, *more: object) -> dict[str, Any]:
        """The figure's plots by name, drawn in memory; nothing if none were asked for. Any: matplotlib has no types."""
        if self.plot is None:
            return {}
        from benchmarks.experiments import figures

        drawn: dict[str, Any] = getattr(figures, figure)(result, *more)
        return drawn

    def finish(self, results: Sequence[Result], drawings: Mapping[str, Any]) -> None:
        """Show tables; write plots, and the JSON last: an interrupted run leaves nothing that looks whole."""
        from protocol.drawing import save_figure

        for result in results:
            out.print(result.table(), highlight=False)
        for name, drawn in drawings.items():
            if self.plot is not None:
                save_figure(picture_file(self.plot, name, only=len(drawings) == 1), drawn)
        whole = [result.as_json() for result in results]
        if len(whole) == 1:
            write_results(self.json, whole[0], self.seed)
        elif self.json is not None:
            points = [point for result in results for point in result.as_points()]
            write_results(self.json, {"experiment": "all", "experiments": whole, "points": points}, self.seed)
