"""What DDP does not average, and says nothing of: found, and told or mended."""

from __future__ import annotations

import logging
import weakref
from functools import partial

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradwire.attach.given import Named, check_left_out
from gradwire.attach.handle import Handle
from gradwire.attach.tree import Tree
from gradwire.attach.wrappers import parameters_of
from gradwire.engine.guards import Unused
from gradwire.errors import ConfigurationError

LOOKS, UNTAKEN = 20, 4
"""Averages, from an optimizer's first step on, at which it is looked whether it took those before; and of how many it
did not until that is told."""

_log = logging.getLogger("gradwire")


class Overlooked:
    """Follows which parameters' gradients come without DDP, or with it without being used.

    Args:
        model: DDP's, whose module and parameters hold nothing of this afterwards.
        parameters: Those that it averages.
        frozen: Those that it knows nothing of, because they require no gradients.
        handle: What averages them; once it is closed, there is nothing to tell.
    """

    def __init__(self, model: DistributedDataParallel, parameters: Named, frozen: Named, handle: Handle) -> None:
        engine = handle.engine
        self._handle = handle
        self._model = weakref.ref(model)
        self._tree = Tree(model.module)
        self._names = {id(each): name for name, each in parameters}
        self._frozen = list(frozen)
        self._first = engine.rank == 0
        self._aloud = self._first and not model.static_graph  # which puts averages off to the end
        self._waiting = False
        self._version: int | None = None
        self._hastily = self._unasked = self._first
        self._used: set[str] = set()
        self._untaken = _Untaken() if self._first else None
        self.unused = Unused(engine.give_back, ask=True) if model.find_unused_parameters else None
        if self.unused is not None:
            engine.guards.append(self.unused)
        self._last = parameters[-1][0]
        hooks: list[RemovableHandle] = []
        if not isinstance(model.module, torch.jit.ScriptModule):  # which takes no such hook
            hooks.append(model.module.register_load_state_dict_post_hook(_Loaded(self)))
        for name, each in parameters if self.unused is not None else parameters[-1:]:
            hook = partial(_on_gradient, weakref.ref(self), name, each.dtype, each.device)
            hooks.append(each.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        weakref.finalize(self, _remove, hooks).atexit = False  # the module may be wrapped anew, again and again

    @property
    def attached(self) -> bool:
        """Whether DDP's gradients are still to be averaged."""
        return self._handle.attached

    def check(self) -> None:
        """To be called before a step's first bucket is averaged.

        Raises:
            ConfigurationError: If the model trains a parameter that DDP did not wrap, or was frozen then.
        """
        model = self._model()
        if model is not None and self._tree.changed():
            ignored = ignored_by(model)
            new = [(name, each) for name, each in self._tree.named_parameters() if id(each) not in self._names]
            for name, each in new:
                if each.requires_grad and id(each) not in ignored:
                    raise ConfigurationError(
                        f"parameter {name!r} is new since DDP wrapped the model, so its gradient is not averaged and "
                        "ranks would drift apart; wrap the model and attach anew"
                    )
            self._frozen = [(name, each) for name, each in new if id(each) not in ignored]
            self._tree.look()
        check_left_out(self._frozen)

    def on_load(self) -> None:
        """Told that the model has loaded a state, after which it may have other parameters."""
        model = self._model()
        if model is None or not self._first:
            return
        if self._untaken is not None:
            self._untaken.on_load()
        known = set(self._names.values())
        now = parameters_of(model.module)
        replaced = [name for name, each in now if name in known and id(each) not in self._names]
        if replaced:
            _log.warning(
                "load_state_dict(assign=True) put another parameter in the place of %r, which DDP does not average; "
                "where the model is trained on, ranks drift apart; load without assign, or wrap and attach anew",
                replaced[0],
            )

    def on_bucket(self, bucket: GradBucket) -> None:
        """Told that DDP brings gradients."""
        self._waiting = False
        model = self._model()
        if model is not None and not model.require_backward_grad_sync:
            self._version = None
            self._tell_of_unasked()
        elif self._version is not None:
            self._look_for_steps(bucket)
        if self.unused is not None:
            names = {self._names[id(each)] for each in bucket.parameters()}
            self.unused.names |= names - self._used
            self._used.difference_update(names)

    def _tell_of_unasked(self) -> None:
        """Says so of a backward pass under ``no_sync()`` after a forward pass that was not."""
        if self._unasked:
            self._unasked = False
            _log.warning(
                "a backward pass under no_sync() was averaged, since DDP goes by the forward pass, and one before it "
                "was not under no_sync(); so an average is sent, and compressed, that nobody asked for, and the pass "
                "that was to be averaged may be left to each rank; run forward and backward under no_sync()"
            )

    def _look_for_steps(self, bucket: GradBucket) -> None:
        """Says so if the last parameter, or its gradient, is not what it was when that came."""
        for each in bucket.parameters():
            if self._names[id(each)] == self._last:
                version, self._version = self._version, None
                if self._hastily and (each.grad is None or each._version != version):
                    self._hastily = False
                    _log.warning(
                        "parameter %r, or its gradient, was changed in the backward pass before its average had come, "
                        "as by an optimizer in a post-accumulate-grad hook; such steps take each rank's own gradients, "
                        "so ranks drift apart; step the optimizer after backward",
                        self._last,
                    )

    def on_gradient(self, name: str, version: int) -> None:
        """Told that a parameter has a gradient, which DDP is to be told of next."""
        self._used.add(name)  # for DDP, too, passes under no_sync() count
        model = self._model()
        if model is None or not (model.require_backward_grad_sync and model.require_forward_param_sync):
            return  # the second is what the last forward pass was told, by which DDP goes
        if name == self._last:
            if self._waiting and self._aloud:
                self._aloud = False
                _log.warning(
                    "a backward pass was not averaged: it did not come from model(...) of DDP, as with "
                    "model.module(...), or another forward or backward pass of DDP came between, and DDP averages one "
                    "backward pass for each forward pass; where its gradients are used, ranks drift apart"
                )
            self._waiting = True
            self._version = version
            if self._untaken is not None and self._untaken.look(version):
                self._untaken = None


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def ignored_by(model: DistributedDataParallel) -> set[int]:
    """The parameters, by id, that DDP was told to ignore."""
    return {id(each) for name, each in model.module.named_parameters() if name in model.parameters_to_ignore}


def check_wrapped(model: DistributedDataParallel, parameters: Named) -> None:
    """Raises ConfigurationError unless DDP averages the gradients of these parameters, and of no others."""
    buckets = model.reducer._get_zeros_like_grad_buckets()
    wrapped = {id(each) for bucket in buckets for each in bucket.parameters()}
    for name, each in parameters:
        if id(each) not in wrapped:
            raise ConfigurationError(
                f"parameter {name!r} was frozen, or was not there, when DDP wrapped the model, so its gradient is not "
                "averaged and ranks would drift apart; wrap the model anew, then attach"
            )
    if len(wrapped) > len(parameters):
        raise ConfigurationError(
            f"DDP wrapped {len(wrapped)} parameters that required gradients, and of these {len(parameters)} are there "
            "and do now; freeze or replace parameters first, then wrap and attach"
        )


class _Untaken:
    """Says so if averages come that no optimizer takes, between others that one does.

    Optimizers whose steps do not count as versions of a parameter are not seen; nor what comes before the first step,
    as loss scales may be why it waits.
    """

    def __init__(self) -> None:
        self._version: int | None = None
        self._looks = self._found = 0

    def on_load(self) -> None:
        """Told that the version may be another one without a step."""
        self._version = None

    def look(self, version: int) -> bool:
        """Looks at a parameter's version when its gradient is about to be averaged; whether that was the last time."""
        before, self._version = self._version, version
        stepped = before not in (None, version)
        self._looks += stepped or self._looks > 0
        self._found += before == version and self._looks > 0
        if self._found == UNTAKEN:
            _log.warning(
                "no optimizer took %d of the last averages before the next ones came, as with those that a GAN's "
                "discriminator gets in its generator's step; they are sent for nothing, and what they leave in "
                "memories goes on; run what nobody takes the gradients of, forward and backward, and all but the last "
                "backward pass of a step, under model.no_sync()",
                UNTAKEN,
            )
        return self._found == UNTAKEN or self._looks == LOOKS


class _Loaded:
    """What a module calls when it has loaded a state; a copy of the module has nobody to tell."""

    def __init__(self, overlooked: Overlooked | None = None) -> None:
        self._overlooked = None if overlooked is None else weakref.ref(overlooked)

    def __call__(self, module: nn.Module, incompatible: object) -> None:
        follower = None if self._overlooked is None else self._overlooked()
        if follower is not None and follower.attached:
            follower.on_load()

    def __reduce__(self) -> tuple[type[_Loaded], tuple[()]]:
        return _Loaded, ()


def _on_gradient(
    overlooked: weakref.ref[Overlooked], name: str, dtype: torch.dtype, device: torch.device, parameter: Tensor
) -> None:
    follower = overlooked()
    if follower is None or not follower.attached:
        return
    if (parameter.dtype, parameter.device) != (dtype, device):
        raise ConfigurationError(
            f"parameter {name!r} was {dtype} on {device} when DDP wrapped it and is {parameter.dtype} on "
            f"{parameter.device} now, so DDP does not average its gradient and ranks would drift apart; convert the "
            "model first, then wrap and attach"
        )
    follower.on_gradient(name, parameter._version)
