"""Methods of one's own: written for a layer, held against the laws in one call, and told what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
import gradwire.cli
from gradwire import ConfigurationError
from gradwire.attach.rehearsal import rehearse
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.methods import LayerMethod, LayerState
from gradwire.methods.registry import methods
from gradwire.wire import AllGather, AllReduceMean, AllReduceSum
from pool import ranks

EVERYTHING = gradwire.DensePolicy(below=0, vectors=False)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a test registers is known in that test only."""
    before = dict(methods._entries)
    yield
    methods._entries = before


@dataclass(frozen=True, kw_only=True)
class Projected(LayerMethod):
    """Means in random directions that all share, with error feedback."""

    citation = "nobody"
    bias = "contractive"
    wire_bits = "32 * rank * n"
    rank: int = 4

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Matrices."""
        return len(shape) > 1 and math.prod(shape[1:]) > self.rank

    def average(self, gradient: Tensor, state: LayerState) -> Generator[Any, Tensor, Tensor]:
        matrix = gradient.view(len(gradient), -1) + state.get("residual", 0)
        q = torch.linalg.qr(torch.randn(matrix.shape[1], self.rank, generator=state.generator())).Q
        average = (yield AllReduceMean(matrix @ q)) @ q.T
        state["residual"] = matrix - average
        return average.view_as(gradient)


Body = Callable[[Tensor, LayerState], Any]


def mine(body: Body, **declared: Any) -> LayerMethod:
    """A method with this body."""
    kind = type("Mine", (LayerMethod,), {"average": lambda self, gradient, state: body(gradient, state), **declared})
    made: LayerMethod = dataclass(frozen=True)(kind)()
    return made


def mean(gradient: Tensor, state: LayerState) -> Any:
    return (yield AllReduceMean(gradient.clone()))


def of_another_shape(gradient: Tensor, state: LayerState) -> Any:
    return (yield AllReduceMean(gradient.clone()))[:1]


def no_generator(gradient: Tensor, state: LayerState) -> Any:
    return gradient


def nothing(gradient: Tensor, state: LayerState) -> Any:
    yield AllReduceMean(gradient.clone())


def a_tensor(gradient: Tensor, state: LayerState) -> Any:
    return (yield gradient)


def values_as_bytes(gradient: Tensor, state: LayerState) -> Any:
    return (yield AllGather(gradient)).mean(0)


def mean_of_levels(gradient: Tensor, state: LayerState) -> Any:
    return (yield AllReduceMean(gradient.int()))


def sum_of_values(gradient: Tensor, state: LayerState) -> Any:
    return (yield AllReduceSum(gradient))


def a_number_kept(gradient: Tensor, state: LayerState) -> Any:
    state["n"] = 1  # type: ignore[assignment]
    return (yield AllReduceMean(gradient.clone()))


def a_name_that_is_taken(gradient: Tensor, state: LayerState) -> Any:
    average = yield AllReduceMean(gradient)
    state["owed"] = torch.ones(1)
    return average


def own_sizes(gradient: Tensor, state: LayerState) -> Any:
    chosen = gradient[gradient.abs() > gradient.abs().mean()]
    yield AllGather(chosen.view(torch.uint8))
    return gradient


def own_rounds(gradient: Tensor, state: LayerState) -> Any:
    for _ in range(1 + state.rank):
        average = yield AllReduceMean(gradient.clone())
    return average


def own_average(gradient: Tensor, state: LayerState) -> Any:
    return (yield AllReduceMean(gradient.clone())) + 1e-3 * state.rank


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (of_another_shape, r"Mine.average of 'matrix', \(72, 48\), returned \(1, 48\); return the average"),
        (nothing, r"returned NoneType; return the average, a tensor of the gradient's shape"),
        (no_generator, r"is no generator but Tensor; yield what is to be sent"),
        (a_tensor, r"a method yielded Tensor; yield a request or a list of requests, such as"),
        (values_as_bytes, r"AllGather was given torch.float32, \(72, 48\); give it uint8\[b\], such as values.flatten"),
        (mean_of_levels, r"AllReduceMean was given torch.int32.*; AllReduceSum adds whole numbers"),
        (sum_of_values, r"AllReduceSum was given torch.float32.*; AllReduceMean averages floating-point tensors"),
        (a_number_kept, r"state\['n'\] = 1 is no tensor; .* give torch.tensor\(1\), or use state.step"),
        (a_name_that_is_taken, r"state\['owed'\] is what the next step adds .*; take another name"),
        (own_sizes, r"rank 1 asks for all-gather of torch.uint8, .* where rank 0 asks for all-gather of torch.uint8"),
        (own_rounds, r"rank 1 asks for all-reduce .* that only ranks \[1\] ask for; in every round ask for the same"),
        (own_average, r"left other averages on rank 1 than on rank 0 in a rehearsal on noise; compute the same bits"),
    ],
)
def test_what_is_wrong_with_a_method_is_told_when_it_is_attached(body: Body, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        rehearse(Configuration.make(mine(body), {}))


def test_a_method_is_a_dataclass_whose_options_are_known() -> None:
    class Plain(LayerMethod):
        def average(self, gradient: Tensor, state: LayerState) -> Any:
            return mean(gradient, state)

    @gradwire.methods.register("needy")
    @dataclass(frozen=True)
    class Needy(Plain):
        k: int

    with pytest.raises(ConfigurationError, match=r"Plain is no dataclass .*; write @dataclass\(frozen=True"):
        gradwire.roundtrip(torch.ones(4), Plain())
    with pytest.raises(ConfigurationError, match="'needy' has no default for k; give it, or its class a default"):
        gradwire.roundtrip(torch.ones(4), "needy")
    gradwire.roundtrip(torch.ones(4), "needy", k=3)


def keeps_what_it_sends(gradient: Tensor, state: LayerState) -> Any:
    """The mean of workers' running sums, by requests whose answers may be written where payloads lie."""
    state["sum"] = state["sum"] + gradient if "sum" in state else gradient
    average = yield AllReduceMean(state["sum"])
    again = yield AllReduceMean(gradient)
    assert not torch.equal(again, gradient)
    return average


@pytest.mark.parametrize("shapes", [[("only", (6, 4))], [("first", (6, 4)), ("second", (5,))]])
def test_what_is_sent_stays_what_it_was(shapes: list[tuple[str, tuple[int, ...]]]) -> None:
    """Whether the wire has to put it together with others, or takes it where it lies; and so does what is kept."""
    slots = flat_slots(shapes)
    world = LocalWorld(Configuration.make(mine(keeps_what_it_sends), {}, dense=EVERYTHING), slots, 2)
    total = torch.zeros(slots[-1].stop)
    for step in range(3):
        gradients = [torch.randn(slots[-1].stop, generator=torch.Generator().manual_seed(5 * step + r)) for r in (0, 1)]
        total += torch.stack(gradients).mean(0)
        world.average(gradients)
        torch.testing.assert_close(gradients[0], total)


def test_payloads_of_any_size_are_read_as_any_type() -> None:
    def sent(gradient: Tensor, state: LayerState) -> Any:
        odd = torch.cat([gradient.flatten().view(torch.uint8), torch.ones(1, dtype=torch.uint8)])
        rows = yield AllGather(odd)
        return rows[:, :-1].clone().view(torch.float32).mean(0).view_as(gradient)

    slots = flat_slots([("first", (3,)), ("second", (5,))])
    world = LocalWorld(Configuration.make(mine(sent), {}, dense=EVERYTHING), slots, 2)
    gradients = [torch.full((8,), float(rank)) for rank in range(2)]
    world.average(gradients)
    assert torch.equal(gradients[0], torch.full((8,), 0.5))


@ranks(2)
def test_a_step_that_is_not_finite_leaves_nothing_in_a_method_of_ones_own() -> None:
    """As in the README: nothing but mathematics, and a residual that would be NaN for ever."""
    matrix = nn.Parameter(torch.zeros(64, 48))
    sync = gradwire.Synchronizer([("matrix", matrix)], Projected(rank=2))
    for step in range(4):
        matrix.grad = torch.randn(64, 48, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        if step == 1 and dist.get_rank() == 1:
            matrix.grad[3, 4] = math.inf
        sync.synchronize()
        assert bool(matrix.grad.isfinite().all()) == (step != 1)
    sync.close()


@pytest.mark.parametrize("following", ["dense", "topk:ratio=0.01", Projected(rank=1)])
def test_what_it_owes_goes_on_in_what_takes_its_place(following: Any) -> None:
    slots = flat_slots([("filter", (8, 6, 3, 3)), ("matrix", (40, 30))])
    world = LocalWorld(Configuration.make(Projected(), {}, dense=EVERYTHING), slots, 2)
    balance = torch.zeros(slots[-1].stop)
    for step in range(6):
        for engine in world.engines:
            if step == 3:
                engine.change(Configuration.make(following, {}, dense=EVERYTHING))
            if step == 5:
                engine.change(Configuration.make("dense", {}, dense=EVERYTHING))
        gradients = [torch.randn(slots[-1].stop, generator=torch.Generator().manual_seed(5 * step + r)) for r in (0, 1)]
        balance += torch.stack(gradients).mean(0)
        world.average(gradients)
        balance -= gradients[0]
    assert float(balance.abs().max()) < 1e-4


def test_what_is_remembered_is_there_after_a_restart() -> None:
    seen: list[list[str]] = []

    def remembering(gradient: Tensor, state: LayerState) -> Any:
        seen.append(sorted(state))
        state["one"], state["two"] = gradient, gradient + 1
        return (yield AllReduceMean(gradient))

    slots = flat_slots([("matrix", (4, 3))])
    chosen = Configuration.make(mine(remembering), {}, dense=EVERYTHING)
    first, second = LocalWorld(chosen, slots, 1), LocalWorld(chosen, slots, 1)
    first.average([torch.ones(12)])
    assert torch.equal(first.engines[0].store.state()["one"]["matrix"], torch.ones(4, 3))
    second.engines[0].store.load(first.engines[0].store.state(), first.engines[0].store.kinds())
    second.average([torch.ones(12)])
    assert seen == [[], ["one", "two"]]


@pytest.mark.parametrize(
    "method",
    [
        *(Projected(), "topk:ratio=0.1", "efsignsgd", "acpsgd", "terngrad", "signsgd", "bf16"),
        *("terngrad:preset=paper", "dgc:warmup=2", "lioncub:sync=1", "fp16:memory=residual", "atomo:rank=16"),
    ],
    ids=str,
)
def test_a_check_of_a_method_that_keeps_the_laws(method: Any) -> None:
    """Also where options bring a bias, or other sizes in the first steps, of which a class does not speak.

    The atoms of a matrix share one draw, so that the mean of 400 is farther off than of elements drawn one by one.
    """
    found = gradwire.check(method)
    assert found.holds, str(found)
    assert len(str(found).splitlines()) == 1 + len(found.findings)


def unlike_itself(gradient: Tensor, state: LayerState) -> Any:
    return (yield AllReduceMean(gradient + torch.rand(())))


def forgetful(gradient: Tensor, state: LayerState) -> Any:
    state["residual"] = state.get("residual", torch.zeros_like(gradient)) + gradient
    return 0.5 * (yield AllReduceMean(state["residual"]))


def short(gradient: Tensor, state: LayerState) -> Any:
    return 0.5 * (yield AllReduceMean(gradient))


def long(gradient: Tensor, state: LayerState) -> Any:
    return 3 * (yield AllReduceMean(gradient))


def hiding(gradient: Tensor, state: LayerState) -> Any:
    return (yield AllReduceMean(gradient.nan_to_num(0, 0, 0)))


def absorbing(gradient: Tensor, state: LayerState) -> Any:
    absorbed.append(gradient.sum())
    return (yield AllReduceMean(gradient)) + 0 * torch.stack(absorbed).sum()


absorbed: list[Tensor] = []


def elsewhere(gradient: Tensor, state: LayerState) -> Any:
    last = next((value for whose, value in reversed(kept) if whose is state), torch.zeros_like(gradient))
    kept.append((state, gradient.clone()))
    return (yield AllReduceMean(gradient + last))


kept: list[tuple[LayerState, Tensor]] = []


@pytest.mark.parametrize(
    ("body", "declared", "law", "said"),
    [
        (own_average, {}, "every rank has the same bits", "rank 1 of 2 has other averages than rank 0 in step 0"),
        (own_sizes, {}, "every rank has the same bits", "rank 1 asks for all-gather"),
        (unlike_itself, {}, "nothing but gradients, seed and step decides", "torch's own generator"),
        (forgetful, {}, "averages and what is owed add up to the mean", "with 2 workers, after step 0, they are off"),
        (short, {"bias": "unbiased"}, "unbiased, as declared", "is off by 0.5 of the gradient, where chance explains"),
        (long, {"bias": "contractive"}, "contractive, as declared", r"is 4 |x|² for a Gaussian x of shape"),
        (short, {"bias": "exact"}, "exact, as declared", "is 0.25 |x|²"),
        (short, {"error_bound": lambda *_: 0.1}, "the error is within its bound, as declared", "0.25 |x|², above 0.1"),
        (short, {"wire_bits": "16 * d"}, "the size is as declared", "131,072 bits, where wire_bits, '16 * d', says 65"),
        (hiding, {}, "what is not finite reaches every rank and no memory", "so no loss scaler sees it"),
        (absorbing, {}, "what is not finite reaches every rank and no memory", "were still not finite"),
        (elsewhere, {}, "a restart gives the same bits", "what it remembers is not all in its state"),
        (lambda g, s: mean(g[0], s), {}, "all shapes that it accepts", "at shape (): "),
    ],
)
def test_a_check_says_what_is_wrong(body: Body, declared: dict[str, Any], law: str, said: str) -> None:
    found = gradwire.check(mine(body, **declared))
    assert not found.holds
    (finding,) = (each for each in found.findings if each.law == law)
    assert finding.holds is False
    assert said in finding.said
    assert f"BROKEN  {law}: " in str(found)


FILE = """
import gradwire
import gradwire.cli
from dataclasses import dataclass
from gradwire.wire import AllReduceMean

@gradwire.methods.register("of-a-file")
@dataclass(frozen=True)
class Half(gradwire.methods.LayerMethod):
    '''Half of it.'''
    share: float = 0.5
    def average(self, gradient, state):
        return self.share * (yield AllReduceMean(gradient))
"""


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["gradwire", *arguments])
    monkeypatch.setenv("GRADWIRE_IMPORT", "")
    code = gradwire.cli.main()
    return code, *capsys.readouterr()


def test_commands_take_methods_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the processes that they start, too; figures that it does not declare are left out."""
    file = tmp_path / "of_a_file.py"
    file.write_text(FILE)
    for words, said in (
        (["methods", "of-a-file"], "none declared"),
        (["methods"], "registered by you\n  of-a-file"),
        (["check", "of-a-file:share=0.2"], "holds   every rank has the same bits"),
        (["analyze", "of-a-file", "--dataset=digits", "--steps=1", "--draws=1"], "layer-wise"),
        (["bench", "sync", "of-a-file", "--shapes=tiny", "--workers=2", "--link=none", "--steps=3"], "of-a-file"),
    ):
        code, out, err = run(*words, "--import", str(file), monkeypatch=monkeypatch, capsys=capsys)
        assert (code, err) == (0, ""), (words, err)
        assert said in out, out
    code, out, err = run("--import", str(file), "check", "of-a-file", "topkk", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, err.startswith("error: method 'topkk' is not known")) == (2, True)
    for name, text, said in (
        ("none.py", None, "there is no file"),
        ("broken.py", "import nothing_such", "cannot be imported: ModuleNotFoundError"),
        ("broken.py", "import nothing_such", "cannot be imported: ModuleNotFoundError"),  # nothing of it was kept
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        code, _, err = run("methods", "--import", str(tmp_path / name), monkeypatch=monkeypatch, capsys=capsys)
        assert (code, said in err, len(err.splitlines())) == (2, True, 1)
