"""``gradwire simulate | advise``: what a step would take, and what to do; and how far off that is here."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.text import Text

from gradwire.cli.arguments import Json, Methods, Natural, OutputFile, OutputFolder, OutputPicture, Positive
from gradwire.cli.bench import bench
from gradwire.cli.output import new_console, write, wrote
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.units import rounded

if TYPE_CHECKING:
    from rich.table import Table

    from gradwire.cost.advice import Candidate
    from gradwire.cost.costs import Profile
    from gradwire.cost.scene import Scene
    from gradwire.cost.simulation import Prediction

Factor = Annotated[float, Parameter(validator=Number(gte=1, lt=math.inf))]


def simulate(
    method: Methods = None,
    *,
    shapes: str = "resnet50",
    workers: Positive = 16,
    link: str = "10gbit",
    latency: str = "50us",
    step_time: str = "0.3",
    device: str = "xeon",
    gpus: Positive = 1,
    near: str = "2400gbit",
    sites: Positive = 1,
    far: str = "1gbit",
    far_latency: str = "30ms",
    lost: Natural = 0,
    slowest: Factor = 1.0,
    every: Positive = 1,
    fragments: Positive = 1,
    delay: Natural = 0,
    plot: OutputPicture | None = None,
    json: Json = None,
) -> None:
    """Say how long a training step would take on a network that is not here, with one method after another.

    The wire's own scheduler runs over a clock. Nothing is trained, and a thousand workers take seconds.

    ```
    gradwire simulate --shapes resnet50 --workers 16 --link 10gbit --latency 50us --step-time 0.3
    gradwire simulate acpsgd:rank=8 topk:ratio=0.001,route=sharded --shapes bert-large --device a100
    gradwire simulate --shapes resnet50 --step-time v100-fp32:64 --device a100 --plot resnet50.png
    gradwire simulate --workers 64 --gpus 8 --sites 2 --far 500mbit
    gradwire simulate topk topk:inside=8 qsgd:inside=8 --workers 64 --gpus 8 --near 200gbit
    gradwire simulate --every 32 --fragments 4 --delay 8 --sites 2 --workers 16
    ```

    Args:
        method: Methods, name:option=value,...; with or without the flag. Every sensible one if not given.
        shapes: Whose parameters: tiny, resnet18, resnet50, resnet152, vgg16, bert-base, bert-large, gpt2, lstm, ncf, or
            a function of your own that returns a module, as train.py:make_model.
        workers: All workers.
        link: Rate of each node's link, in each direction.
        latency: Of a message through it.
        step_time: Seconds of a step of one worker without averages; or, of resnet50, GPU:batch of a published
            throughput, such as v100-fp32:64.
        device: What encodes: xeon (measured, one core of an Intel Xeon), h200 or a100 (computed), or a file that
            gradwire bench costs made.
        gpus: Workers in a node that share its link; then methods are tried with inside=, too.
        near: Rate of each worker's link within a node.
        sites: Places that the nodes are divided among.
        far: Rate of each site's link to the others.
        far_latency: Of a message between sites.
        lost: Workers that have failed; the others go on.
        slowest: How many times as long as the others' the slowest worker's computation takes.
        every: Average parameters in every so many steps instead of gradients in each.
        fragments: Parts of the parameters that are averaged at different steps, as in Streaming DiLoCo.
        delay: Steps that go on while an average is on its way.
        plot: Draw step time against the rate of the link to this file; needs matplotlib.
        json: Write all predictions to this file too.
    """
    from gradwire.cost import advice
    from gradwire.cost.periodic import spread_out
    from gradwire.cost.scene import Scene
    from gradwire.cost.simulation import plain
    from gradwire.cost.simulation import simulate as run
    from gradwire_bench import origin

    scene = Scene(shapes, workers, link, latency, step_time, device, gpus, near, sites, far, far_latency, lost, slowest)
    model = scene.model()
    setting = scene.setting(model)
    tried = _candidates(method, gpus, setting.profile)
    now_and_then = every > 1 or fragments > 1 or delay > 0
    if now_and_then and plot is not None:
        raise ConfigurationError("--plot draws averages of gradients; leave it out, or --every and what goes with it")
    if now_and_then:
        rows = [spread_out(each, setting, every, fragments, delay) for each in [None, *tried]]
    else:
        rows = [plain(setting), *(run(each.configuration, setting, each.label) for each in tried)]
    console = new_console()
    console.print(_table(rows, _title(scene, model.numel), setting.workload.seconds * slowest, named=bool(method)))
    console.print(Text(_about(setting.profile, method), "dim"))
    if plot is not None:
        from gradwire_bench import cost_pictures

        cost_pictures.bandwidth_plot(scene, model, tried, plot)
        wrote(plot)
    write(json, origin.document("simulate", scene=scene, predictions=[advice.as_plain(row) for row in rows]))


def advise(
    model: str | None = None,
    *,
    method: Methods = None,
    shapes: str = "resnet50",
    workers: Positive = 16,
    link: str = "10gbit",
    latency: str = "50us",
    step_time: str | None = None,
    device: str = "xeon",
    gpus: Positive = 1,
    near: str = "2400gbit",
    json: Json = None,
) -> None:
    """Say whether compression pays, with what, and the line to paste.

    By itself it takes your word for the network. Under torchrun it measures the group that it runs in, and the
    backward pass, if the function returns a module and a function from the module to a step's loss.

    ```
    gradwire advise --shapes resnet50 --step-time 0.3 --link 10gbit --workers 16
    torchrun --nproc-per-node 4 -m gradwire advise train.py:make_model
    ```

    Args:
        model: A function without arguments that returns a module, or a module and a function that gives the loss of a
            step, as train.py:make_model; in place of shapes.
        method: Methods to choose among, name:option=value,...; may be repeated; every sensible one if not given.
        shapes: As for simulate.
        workers: As for simulate; under torchrun the group's.
        link: As for simulate; under torchrun measured.
        latency: As for simulate; under torchrun measured.
        step_time: As for simulate; under torchrun measured where the function gives a loss.
        device: As for simulate.
        gpus: As for simulate.
        near: As for simulate.
        json: Write all predictions to this file too.
    """
    from gradwire.cost import advice
    from gradwire.cost.scene import Scene
    from gradwire_bench import origin

    scene = Scene(model or shapes, workers, link, latency, step_time or "0.3", device, gpus, near=near)
    if (group := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        from gradwire.cost.group import look, started

        tried = _candidates(method, started() if started() < group else 1)
        quiet = Console(quiet=True) if os.environ.get("RANK", "0") != "0" else new_console()
        with quiet.status("measuring the group, its collectives, encoding, and backward"):
            seen = look(scene, step_time is not None, tried)
        if seen is None:
            return
        setting, numel, title = seen
    else:
        shaped = scene.model()
        setting, numel = scene.setting(shaped), shaped.numel
        tried = _candidates(method, gpus, setting.profile)
        title = _title(scene, numel)
    found = advice.advise(setting, tried)
    console = new_console()
    console.print(_table(found.rows, title, setting.workload.seconds, named=bool(method)))
    console.print(f"\n[bold]{found.reason}[/bold]\n\n    {found.line}\n", highlight=False)
    console.print(Text(_about(setting.profile, method), "dim"))
    write(
        json,
        origin.document(
            "advise",
            scene=scene,
            recommended=found.chosen.label if found.chosen else None,
            reason=found.reason,
            line=found.line,
            predictions=[advice.as_plain(row) for row in found.rows],
        ),
    )


def _candidates(texts: Sequence[str] | None, node: int, profile: Profile | None = None) -> list[Candidate]:
    """Those asked for, or every sensible one for so many workers a node of which a profile has costs."""
    from gradwire.cost import shapes
    from gradwire.cost.advice import Candidate, candidates
    from gradwire_bench.contenders import DDP, Contender

    if not texts:
        return [each for each in candidates(node) if profile is None or profile.knows(each.name)]
    for text in texts:
        if text in shapes.names() or text.partition(":")[0].endswith(".py"):
            raise ConfigurationError(f"{text!r} is a model and no method; write it as --shapes {text}")
    parsed = [Contender.parse(text) for text in texts]
    if odd := [each for each in parsed if each.name == DDP and each.options]:
        raise ConfigurationError(f"'{odd[0]}': DDP is simulated with its usual buckets; leave its options out")
    return [Candidate.make(each.name, dict(each.options)) for each in parsed if each.name != DDP]


def _about(profile: Profile, named: Sequence[str] | None) -> str:
    """Where times of encoding are from, and which methods a table lacks for want of them, if none were named."""
    from gradwire.cost.advice import METHODS

    lacking = [] if named else [name for name, _ in METHODS if not profile.knows(name)]
    without = f"; without {' and '.join(lacking)}, of which it has no times" if lacking else ""
    how = "measured" if profile.origin == "measured" else "computed, not measured,"
    return f"encoding and decoding: {how} on {profile.device}, {profile.about}{without}"


def _title(scene: Scene, numel: int) -> str:
    nodes = f", {scene.gpus} in a node" if scene.gpus > 1 else ""
    sites = f", {scene.sites} sites joined at {scene.far}" if scene.sites > 1 else ""
    return (
        f"{scene.shapes}, {rounded(numel / 1e6, 3)} M parameters, {scene.workers} workers{nodes}{sites}, "
        f"link {scene.link}, {scene.latency}, a step takes {scene.step_time}"
    )


def _table(rows: Sequence[Prediction], title: str, computed: float, *, named: bool) -> Table:
    """All rows if the methods were named, else of each method the fastest way."""
    from gradwire_bench.terminal import table

    heads = ("ms a step", "± ms", "of it exposed", "times DDP", "MB sent", "MB kept", "encode + decode ms")
    shown = table(title, "", *heads)
    best = min(row.seconds for row in rows)
    drawn = rows if named else _best_ways(rows)
    for row in drawn:
        times = rows[0].seconds / row.seconds
        style = "bold" if row.seconds == best else ""
        shown.add_row(
            ", ".join(part.strip() for part in row.label.split(",")),
            rounded(1e3 * row.seconds, 4),
            rounded(500 * (row.high - row.low), 2),
            f"{100 * row.exposed / row.seconds:.0f} %",
            Text(f"{times:.2f}", style="green" if times > 1.02 else "red" if times < 0.98 else ""),
            rounded(row.wire_bytes / 1e6, 4),
            rounded(row.memory_bytes / 1e6, 4),
            f"{rounded(1e3 * row.encode, 3)} + {rounded(1e3 * row.decode, 3)}{' *' * bool(row.note)}",
            style=style,
        )
    alone = f"a step that averages nothing: {rounded(1e3 * computed, 4)} ms, with DDP's copies into its buckets"
    shown.caption = f"{alone}; of each method {'all that was named' if named else 'the fastest way of those tried'}"
    if any(row.note for row in drawn):
        shown.caption += "; * as it takes with other options, granularity or route"
    return shown


def _best_ways(rows: Sequence[Prediction]) -> list[Prediction]:
    """Of each method and its options the fastest granularity and route."""
    ways: dict[str, Prediction] = {}
    for row in rows:
        name, _, options = row.label.partition(":")
        kept = [each for each in options.split(",") if not each.startswith(("granularity=", "route=", "inside="))]
        key = f"{name}:{','.join(kept)}"
        if key not in ways or row.seconds < ways[key].seconds * (1 - 1e-3):
            ways[key] = row
    return list(ways.values())


@bench.command
def costs(path: OutputFile, /, method: Methods = None, *, name: str = "here") -> None:
    """Measure what methods take here, for gradwire simulate --device FILE.json.

    Time is that of the thread, whatever else runs; about 20 s a method on an idle core.

    ```
    gradwire bench costs here.json
    ```

    Args:
        path: Where the profile goes.
        method: Methods, name:option=value,...; with or without the flag; those that advise tries if not given.
        name: What to call the device.
    """
    from gradwire.cost import measure
    from gradwire.cost.advice import candidates
    from gradwire_bench.contenders import Contender

    tried = [Contender.parse(text).configuration() for text in method or ("dense",)]
    tried += [] if method else [each.configuration for each in candidates() if "granularity" not in each.arguments]
    console = new_console()
    with console.status("measuring") as status:
        found = measure.measured(tried, name, status.update)
    found.write(path)
    wrote(path)


@bench.command
def validate(
    method: Methods = None,
    *,
    workers: Annotated[list[Positive], Parameter(negative=())] = [2, 4, 8],  # noqa: B006
    link: Annotated[list[str], Parameter(negative=())] = ["100mbit", "300mbit", "1gbit", "none"],  # noqa: B006
    steps: Positive = 9,
    again: Path | None = None,
    out: OutputFolder = Path("results/validate"),
) -> None:
    """Hold predicted step times against measured ones in shaped networks: averages alone, and with real backward.

    Each group first measures what advise measures: its collectives, encoding and decoding, backward. Two constants are
    fitted to half of the settings; the other half is reported. A small GPT-2 of 3.7 M parameters.

    ```
    gradwire bench validate --out docs/data
    ```

    Args:
        method: Contenders, name:option=value,...; with or without the flag; eight if not given.
        workers: Worker processes; may be repeated.
        link: Rate of each worker's link, or none for plain loopback; may be repeated.
        steps: Timed steps of each contender.
        again: Measure nothing: predict anew what such a JSON has, from what its groups measured of themselves.
        out: Folder for validate.json and validate.png.
    """
    import json

    from gradwire_bench import origin
    from gradwire_bench import validate as bench_validate
    from gradwire_bench.launch import link_rate

    console = new_console()
    points: list[bench_validate.Point] = []
    probes: list[dict[str, object]] = []
    when: dict[str, object] = {}
    chosen = list(method or bench_validate.METHODS)
    _candidates(chosen, 1)  # so that what cannot be is told now, as of links
    for each in link:
        link_rate(each)
    if again is not None:
        try:
            measured_then = json.loads(again.read_text())
            when = {key: measured_then[key] for key in ("date", "machine")}
            (points, probes), link = bench_validate.read(measured_then), []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GradwireError(f"{again} is no JSON of gradwire bench validate: {error}") from error
    with console.status("measuring") as status:
        for each, number in product(link, workers):
            found, probed = bench_validate.measure(number, each, chosen, steps, status.update)
            points, probes = points + found, probes + probed
            for point in found:
                console.print(
                    f"{point.link:>8} {point.workers} workers {point.mode:8} {point.method:26} predicted "
                    f"{1e3 * point.predicted:8.1f} ms, measured {1e3 * point.measured:8.1f} ms, "
                    f"{100 * point.error:+.0f} %"
                )
            measured = origin.document("bench.validate", fit=bench_validate.Fit(), points=points, probes=probes)
            origin.write_json(out / "validate.json", measured)  # for --again, if this is broken off
        first, other = bench_validate.parted(points)
        fit = bench_validate.calibrated(first, probes, status.update) if other else bench_validate.Fit()
    nothing_fitted = bench_validate.again(points, probes, bench_validate.Fit())
    points = bench_validate.again(points, probes, fit)
    held_out = bench_validate.parted(points)[1]
    errors = {
        "nothing fitted": bench_validate.errors(nothing_fitted),
        "calibrated": bench_validate.errors(points),
        **({"calibrated, held out": bench_validate.errors(held_out)} if held_out else {}),
    }
    for title, table in {**bench_validate.signed(points), **errors}.items():
        plus = "+" if title.startswith("signed") else ""
        console.print(f"{title}: " + ", ".join(f"{name} {100 * value:{plus}.0f} %" for name, value in table.items()))
    console.print(f"calibrated by half of the settings: {fit}")
    reported = held_out or points
    bench_validate.scatter_plot(reported, out / "validate.png", bench_validate.errors(reported)["median"])
    document = origin.document("bench.validate", fit=fit, errors=errors, points=points, probes=probes)
    origin.write_json(out / "validate.json", {**document, **when})
    wrote(out / "validate.json", out / "validate.png")
