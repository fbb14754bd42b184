"""Runs the sections of ``gradwire bench periodic`` and leaves their tables, JSON files and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gradwire.errors import GradwireError
from gradwire_bench import origin, periodic, periodic_plans, periodic_results, pictures, report
from gradwire_bench.data import Dataset
from gradwire_bench.launch import NO_LINK
from gradwire_bench.optimizers import OptimizerName
from gradwire_bench.periodic_plans import Run
from gradwire_bench.periodic_results import Average, Outcome, Row
from gradwire_bench.shapes import get as get_shapes
from gradwire_bench.terminal import bars
from gradwire_bench.workloads import LANGUAGE, Workload


@dataclass(frozen=True)
class Bench:
    """What all sections share.

    Attributes:
        console: Where tables and progress go.
        link: Rate of each worker's link such as ``"100mbit"``, or ``"none"`` for plain loopback.
        seeds: Of the trainings.
        steps: Steps of all workers together in a training.
        dataset: The images.
        batch: Samples a worker and step; ``None`` for 16 images or 8 pieces of text.
        out: Folder for files.
    """

    console: Console
    link: str
    seeds: Sequence[int]
    steps: int
    dataset: Dataset
    batch: int | None
    out: Path

    def claim(self, workloads: Sequence[Workload]) -> list[Row]:
        """PQASGD at 3 to 5 % of the bytes against full communication, at 4 and 8 workers."""
        found: list[Row] = []
        for workload in workloads:
            outcomes: list[Outcome] = []
            for workers in periodic_plans.CLAIM_WORKERS:
                runs = periodic_plans.claim_runs(workload, workers, self.seeds, self.steps)
                trained = self._train(f"claim_{workload.name}", outcomes, workload, workers, self.link, runs)
                rows = periodic_results.summary(trained)
                outcomes += trained
                found += rows
                where = self._where(workload, self.link)
                self.console.print(report.periodic_table(rows, f"The claim, {workers} workers, {where}"))
                facts = {"workload": workload.name, "learning_rate": workload.learning_rate}
                rows = periodic_results.summary(outcomes)
                self._leave(f"claim_{workload.name}", **facts, rows=rows, outcomes=outcomes)
                self._picture(
                    f"claim_{workload.name}_{workers}.png",
                    [row for row in rows if row.workers == workers],
                    f"{workload.what}: loss against bytes, {workers} workers",
                    where,
                )
        _fail_if_nothing(found)
        return found

    def speedup(self, workloads: Sequence[Workload]) -> list[periodic_results.Speedup]:
        """Loss against workers times steps, at 1, 2, 4 and 8 workers."""
        found: list[periodic_results.Speedup] = []
        for workload in workloads:
            outcomes: list[Outcome] = []
            for workers in periodic_plans.SPEEDUP_WORKERS:
                runs = periodic_plans.speedup_runs(workload, workers, self.seeds, self.steps)
                outcomes += self._train(f"speedup_{workload.name}", outcomes, workload, workers, NO_LINK, runs)
            rows = periodic_results.speedups(outcomes)
            where = self._where(workload, NO_LINK)
            title = f"{periodic_plans.SPEEDUP.label}, learning rate in proportion to sqrt(M / K), {where}"
            self.console.print(report.speedup_table(rows, title))
            self._leave(f"speedup_{workload.name}", workload=workload.name, rows=rows, outcomes=outcomes)
            if rows:
                path = self.out / f"speedup_{workload.name}.png"
                pictures.speedup_plot(rows, path, f"{workload.what}: {periodic_plans.SPEEDUP.label}", where)
                self._wrote(path)
            found += rows
        if not found:
            raise GradwireError("no training came to an end; the JSON says why")
        return found

    def volume(self, workload: Workload) -> list[Row]:
        """Loss at ever fewer bytes, AdamW."""
        runs = periodic_plans.volume_runs(workload, self.seeds, self.steps)
        workers = periodic_plans.VOLUME_WORKERS
        outcomes = self._train(f"volume_{workload.name}", [], workload, workers, NO_LINK, runs, optimizer="adamw")
        rows = periodic_results.summary(outcomes)
        where = f"AdamW, {workers} workers, {self._where(workload, NO_LINK)}"
        self.console.print(report.periodic_table(rows, f"Ever fewer bytes, {where}"))
        least = periodic_results.least_volume(rows)
        if least is not None:
            self.console.print(
                "Least bytes with a mean loss at most "
                f"{periodic_results.VOLUME_TOLERANCE:.0%} above full communication's: {least.share:.2%}, {least.label}"
            )
        facts = {"workload": workload.name, "learning_rate": workload.adam_rate}
        self._leave(f"volume_{workload.name}", **facts, rows=rows, least=least, outcomes=outcomes)
        title = f"{workload.what}: loss against bytes, {workers} workers"
        self._picture(f"volume_{workload.name}.png", rows, title, f"AdamW, {self._where(workload, NO_LINK)}")
        _fail_if_nothing(rows)
        return rows

    def overhead(self, shapes: str) -> None:
        """A step in which nothing is sent, the time of an average, and the waiting that a delay hides.

        Raises:
            ConfigurationError: If there are no such shapes.
        """
        get_shapes(shapes)
        with self.console.status("timing optimizer steps"):
            silent = periodic.silence()
        self.console.print(report.silence_table(silent, periodic_results.SILENT_LIMIT))
        averages: list[Average] = []
        for workers in periodic_plans.AVERAGE_WORKERS:
            rows = self._averages(shapes, workers)
            title = f"An average of the shapes of {shapes}, {workers} workers, link {self.link}"
            self.console.print(report.average_table(rows, title, periodic_results.AVERAGE_LIMIT))
            averages += rows
        runs = periodic_plans.stream_runs(LANGUAGE, seed=0)
        outcomes = self._train("overhead", [], LANGUAGE, periodic_plans.STREAM_WORKERS, self.link, runs, large=True)
        streams = periodic_results.streams(outcomes)
        title = (
            f"Waiting for averages, fp32, {periodic_plans.STREAM_WORKERS} workers, {LANGUAGE.what}, link {self.link}"
        )
        self.console.print(report.stream_table(streams, title, periodic_results.HIDDEN_LEAST))
        self._leave("overhead", silence=silent, averages=averages, streams=streams, outcomes=outcomes)

    def _averages(self, shapes: str, workers: int) -> list[Average]:
        """Times averages with a live bar."""
        with bars(self.console) as progress:
            task = progress.add_task(f"averages, {workers} workers", total=len(periodic.AVERAGED), news="starting")

            def show(rows: list[Average]) -> None:
                waiting = [row.method for row in rows if not row.seconds and row.error is None]
                news = f"next: {waiting[0]}" if waiting else ""
                progress.update(task, completed=len(rows) - len(waiting), news=news)

            return periodic.averages(shapes, workers, self.link, on_progress=show)

    def _train(
        self,
        section: str,
        before: Sequence[Outcome],
        workload: Workload,
        workers: int,
        link: str,
        runs: Sequence[Run],
        *,
        optimizer: OptimizerName = "sgd",
        large: bool = False,
    ) -> list[Outcome]:
        """Trains with a live bar; whatever has ended, ``before`` included, is in the section's file from then on."""
        kept = 0
        with bars(self.console) as progress:
            name = f"{workload.name}, {workers} worker{'s' if workers > 1 else ''}"
            task = progress.add_task(name, total=sum(run.steps for run in runs), news="starting")

            def show(outcomes: list[Outcome]) -> None:
                nonlocal kept
                ended = [each for each in outcomes if each.loss is not None or each.error]
                if len(ended) > kept:
                    kept = len(ended)
                    self._write(section, workload=workload.name, outcomes=[*before, *ended])
                progress.update(task, completed=sum(each.steps_done for each in outcomes), news=_news(outcomes))

            outcomes = periodic.train(
                workload,
                workload.locate(self.dataset),
                workers,
                link,
                runs,
                optimizer=optimizer,
                large=large,
                batch=self.batch,
                on_progress=show,
            )
        return outcomes

    def _where(self, workload: Workload, link: str) -> str:
        seeds = f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
        return f"{workload.locate(self.dataset).name}, {seeds}, link {link}"

    def _picture(self, name: str, rows: Sequence[Row], title: str, subtitle: str) -> None:
        if any(row.loss is not None for row in rows):
            pictures.volume_plot(rows, self.out / name, title, subtitle)
            self._wrote(self.out / name)

    def _leave(self, section: str, **content: object) -> None:
        path = self._write(section, **content)
        self.console.print(f"[dim]{origin.machine_line()}[/dim]")
        self._wrote(path)

    def _write(self, section: str, **content: object) -> Path:
        path = self.out / f"{section}.json"
        facts = {
            "section": section,
            "link": self.link,
            "seeds": len(self.seeds),
            "steps": self.steps,
            "batch": self.batch,
        }
        origin.write_json(path, origin.document("bench.periodic", **facts, **content))
        return path

    def _wrote(self, path: Path) -> None:
        self.console.print(f"Wrote {path}", soft_wrap=True, markup=False)


def _news(outcomes: Sequence[Outcome]) -> str:
    done = [each for each in outcomes if each.loss is not None]
    failed = next((each.error for each in outcomes if each.error), None)
    if failed:
        return failed
    return f"{done[-1].run.plan.label}: loss {done[-1].loss:.3f}" if done else ""


def _fail_if_nothing(rows: Sequence[Row]) -> None:
    if all(row.error for row in rows):
        raise GradwireError("no plan could be measured; the table says why")
