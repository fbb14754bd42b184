"""What a GPU lacks is said where a method is attached, and not in the middle of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from elsewhere import GPU, a_gpu
from gradwire.attach import rehearsal
from gradwire.attach.averaged import Averaged
from gradwire.attach.rehearsal import rehearse_all
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.kernels import dispatch
from gradwire.state.form import Ranks


@contextmanager
def free(nbytes: int) -> Iterator[None]:
    """A GPU with so much room, half of it torch's own already."""
    half = nbytes // 2
    with mock.patch.multiple(
        torch.cuda,
        mem_get_info=lambda device: (nbytes - half, 80 * 10**9),
        memory_reserved=lambda device: half + 7,
        memory_allocated=lambda device: 7,
    ):
        yield


def averaged(*shape: int) -> Averaged:
    return Averaged({"weight": {"shape": [*shape], "dtype": "torch.float32"}}, 0, Ranks((0, 1)), None)


def test_a_residual_that_has_no_room_is_found_out() -> None:
    configuration = Configuration.make("efsignsgd", {}, route="gather")
    with free(4 * 10**6):
        averaged(1000, 1000).check_room(configuration, GPU, 1)
        averaged(9000, 9000).check_room(configuration, torch.device("cpu"), 1)
        with pytest.raises(ConfigurationError, match=r"takes 8\.0 MB on cuda:0, where 4\.0 MB .*rollback.*bfloat16"):
            averaged(1000, 1000).check_room(configuration, GPU, 2)
        with pytest.raises(ConfigurationError, match=r"takes 4\.4 MB on cuda:0, where 4\.0 MB are free, with efsign"):
            averaged(1000, 1100).check_room(configuration, GPU, 1)


def test_of_what_is_remembered_in_turns_the_most_counts() -> None:
    configuration = Configuration.make("acpsgd", {"rank": {0: 1, 10: 8}})
    with free(4 * 10**6 + 20_000), pytest.raises(ConfigurationError, match=r"takes 4\.[01] MB"):
        averaged(1000, 1000).check_room(configuration, GPU, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU of its own")
def test_kernels_that_cannot_be_compiled_are_found_out() -> None:
    configuration = Configuration.make("qsgd", {})
    broken = mock.Mock(side_effect=RuntimeError("Failed to find C compiler"))
    with mock.patch.object(rehearsal, "_rehearsed", set()), a_gpu():
        own = {**dispatch.overrides("cuda"), "encode": broken}
        with (
            mock.patch.object(dispatch, "overrides", return_value=own),
            pytest.raises(RuntimeError, match="C compiler") as raised,
        ):
            rehearse_all(configuration, GPU)
        assert "rehearsed" in raised.value.__notes__[-1]
        rehearse_all(configuration, GPU)
    broken.assert_called_once()


def test_where_the_reference_runs_a_warning_says_so() -> None:
    told = mock.Mock()
    with mock.patch.object(rehearsal._log, "warning", told), mock.patch.object(rehearsal, "rehearse") as rehearsed:
        for aloud in (True, False):
            rehearse_all(Configuration.make("qsgd", {}), torch.device("mps", 0), aloud=aloud)
    assert [call.args[1].startswith("on mps:0 the reference runs") for call in told.call_args_list] == [True]
    rehearsed.assert_not_called()
