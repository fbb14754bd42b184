"""The way in for ``DistributedDataParallel``: a communication hook."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradwire.attach.apart import take_apart
from gradwire.attach.ddp_buckets import Buckets, Collected
from gradwire.attach.fsdp import compress_sharded, sharded_model
from gradwire.attach.given import check_parameters, default_group
from gradwire.attach.handle import Handle
from gradwire.attach.memory_order import check_order
from gradwire.attach.overlooked import Overlooked, check_wrapped, ignored_by
from gradwire.attach.roll_call import RollCall
from gradwire.attach.twice import hooked
from gradwire.attach.wrappers import parameters_of, unwrapped_model
from gradwire.codecs.codec import Codec
from gradwire.engine.choices import FUSE_BYTES, Choices
from gradwire.engine.engine import Engine
from gradwire.engine.guarding import Guarding
from gradwire.engine.mixture import Methods, configure
from gradwire.engine.recipes import RECIPE
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.layout import GRADIENT_DTYPES, check_tables
from gradwire.memory import Memory
from gradwire.policy import DensePolicy
from gradwire.wire import Wire
from gradwire.wire.wire import TensorFuture


class _Detached:
    """What a copy of a model has in the hook's place.

    DDP makes a copy's reducer without hooks, so the copy averages densely until a method is attached to it.
    """


@dataclass(frozen=True)
class _Hook:
    """What DDP calls with every bucket.

    An error in a future would come out of ``backward`` as a RuntimeError of DDP's own, and leave DDP in the middle of
    its step. So the futures bring no errors; a callback at the end of ``backward`` does.

    Attributes:
        engine: Asked whether a step can begin.
        wire: What the buckets are averaged on.
        averages: Where buckets go.
        overlooked: Told of what DDP brings.
        names: Each parameter's name, by its id.
        written: Parameters whose gradients DDP writes averages to, in memory that autograd gave them.
        checked: Buckets, by ids and strides, in which gradients were found in their parameters' memory order.
        came: Parameters, by id, whose gradients came in the step under way. When a step begins and ends is known by
            them: in the first one of a static graph DDP has every bucket for the first, and none for the last.
    """

    engine: Engine
    wire: Wire
    averages: Buckets | Collected
    overlooked: Overlooked
    names: dict[int, str]
    written: Sequence[nn.Parameter]
    checked: set[tuple[tuple[int, tuple[int, ...]], ...]] = field(default_factory=set)
    came: set[int] = field(default_factory=set)

    def __reduce__(self) -> tuple[type[_Detached], tuple[()]]:
        return _Detached, ()

    def on_bucket(self, bucket: GradBucket) -> TensorFuture:
        """Queues a bucket."""
        if not self.came:
            self.overlooked.check()
            self.engine.before_step()
        self._check_order(bucket)
        self.overlooked.on_bucket(bucket)
        self.came.update(map(id, bucket.parameters()))
        last = len(self.came) == len(self.names)
        if last:  # all gradients are in buckets
            self.came.clear()
            take_apart(self.written)
        try:
            future = self.averages.on_bucket(bucket, last)
        except GradwireError:
            raise
        except BaseException as error:  # an interrupt; DDP finishes its step, or it could begin no other
            self.wire.fail(error)
            future = self.wire.promise(otherwise=bucket.buffer())
        if last:
            if torch._C._current_graph_task_id() >= 0:
                _queue_callback(lambda: self._before_ddp(future))
            else:  # no backward pass: DDP follows the others' steps for a rank whose inputs have ended
                self.wire.wait(future)
        return future

    def _check_order(self, bucket: GradBucket) -> None:
        parameters = bucket.parameters()
        order = tuple((id(each), each.stride()) for each in parameters)
        if order not in self.checked and torch._C._current_graph_task_id() >= 0:
            check_order(bucket.buffer(), [(self.names[id(each)], each) for each in parameters])
            self.checked.add(order)

    def _before_ddp(self, future: TensorFuture) -> None:
        if (
            self.overlooked.unused is not None
        ):  # DDP goes on to wait for a collective of its own, which may fail as well
            self.wire.wait(future)
        _queue_callback(self.wire.check)


_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
"""Has something called when the backward pass under way is through, after what was queued before."""


def _on_bucket(hook: _Hook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return hook.on_bucket(bucket)


def compress(
    model: nn.Module,
    method: Methods = RECIPE,
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    granularity: str | None = None,
    route: str | None = None,
    memory: str | Memory | None = None,
    owner: str | Codec | None = None,
    dense: DensePolicy | None = None,
    seed: int = 0,
    fuse_bytes: int = FUSE_BYTES,
    grad_scaler: torch.amp.GradScaler | None = None,
    rollback: bool | None = None,
    learning_rate: Callable[[], float] | None = None,
    clip_spikes: float | None = None,
    audit_every: int = 0,
    verify_every: int = 0,
    start: int = 0,
    inside: int | str | None = None,
    name: str | None = None,
    **options: Any,
) -> Handle:
    """Averages the gradients of a DDP or FSDP2 model through a compression method from now on.

    A model that went through ``fully_shard`` on a mesh with a dimension of replicas, or through ``replicate``, is
    averaged over the replicas of each shard; FSDP goes on to gather and reduce over the shards. To be called when all
    of the model is sharded, on the outermost module.

    To be called on every rank, with the same arguments, before the first backward pass. Copies of the model, such as
    ``copy.deepcopy`` and ``torch.load`` make, average as plain DDP does until this is called on them.

    When a worker ends, stops or fails, ``backward`` raises a :class:`gradwire.WireError` on all others, at the latest
    after the process group's timeout; what a method raises comes out of ``backward`` as it is.

    Args:
        model: The wrapped or sharded model, also within what ``torch.compile`` or Lightning Fabric made of it; float32,
            float16, bfloat16 or float64 parameters, in the memory format in which DDP wrapped them.
        method: A name of ``gradwire.methods.names()``, also with options, as in ``"topk:ratio=0.01,memory=ef21"``; or a
            method object; or one of these for each pattern of parameter names, such as ``{"embed*": "topk:ratio=0.01",
            "*": "qsgd"}``: the first pattern of ``fnmatch`` that a name matches counts, and none may be left over. A
            pattern's may change its options: ``{0: "topk:ratio=0.25", 100: "topk:ratio=0.01"}`` in its place.
            ``"recipe:momentum"`` is the line that was measured to keep the accuracy under an optimizer (``gradwire
            recipes``), of several the one that so many workers send least with; ``"recipe"`` that under SGD, momentum,
            AdamW and Muon alike, but for the task that the page of recipes names. ``"auto"`` tries in some 40 steps
            what may be fastest here, of ``among=[...]`` if given, and stays with what was: ``handle.advice``,
            ``handle.reconsider()``.
        process_group: The workers that hold the same shards, of a model that was sharded on a mesh of one dimension.
        granularity: Where segments end that share a scale or a top-k: ``"layer"``, each parameter; ``"bucket"``, each
            of DDP's buckets; ``"model"``, the whole gradient; ``"row"``, the weights of each unit; or ``"block:N"``,
            each N elements of a parameter; or a name that you registered. The method's own if None.
        route: How payloads become an average; the method's own if None. ``"allreduce"``: codes are added up on their
            way. ``"gather"``: every payload goes to everybody. ``"sharded"``: every worker averages a share of the
            elements and compresses it again. ``"merge"``: sparse sets are merged pair by pair, for ``gtopk`` only.
            ``"regions"``: sparse values are reduced by regions that are balanced, for ``oktopk`` only.
        memory: What is carried from step to step: a memory object, such as ``gradwire.memory.Residual(beta=0.9)``, or a
            name for one with the paper's weights; the method's own if None. ``"none"``; ``"residual"``, error feedback:
            what was not sent; ``"momentum"``, and momentum is sent; ``"dgc"``, momentum correction, forgotten where it
            was sent; ``"ef21"``, an estimate of the gradient, whose error is sent; ``"lowpass"``, a moving average of
            errors; ``"diana"``, an estimate of the gradient for unbiased methods.
        owner: What the average is compressed with on the sharded route, and put through on the gather route: a codec,
            or a name of ``gradwire.codecs.quantize.names()``, such as ``"qsgd:8"`` of its ``"qsgd:N"``; if None, the
            method's own on the sharded route and nothing on gather.
        dense: Which tensors are averaged densely; if None, what the method leaves to that: 1-D tensors and those below
            1,024 elements, but for ``deadzone``, ``dithered`` and ``subspace``, which code all.
        seed: Where all randomness starts; torch's generators are never touched.
        fuse_bytes: Payload to gather before a collective is issued, in bytes.
        grad_scaler: The ``torch.amp.GradScaler`` that scales the loss, starting alike on all ranks. Then gradients are
            divided by its scale before anything else and their averages multiplied by it, so what is remembered and
            every threshold are in units of the unscaled loss. Without it a change of scale cannot be told from a change
            of the gradient, and what was remembered before has the wrong weight after it.
        rollback: Whether a step with an average that is not finite is taken back, so that nothing is remembered of it
            on any rank and the next step is as if it had not been; costs one pass over each average and a second copy
            of what is remembered. None for wherever a ``grad_scaler`` is given, which skips the optimizer's step then,
            or what is remembered would never come right again, which is so of ``"ef21"`` and ``"diana"`` and may be
            of a :class:`gradwire.methods.LayerMethod`.
        learning_rate: A function that gives the current learning rate, such as
            ``lambda: optimizer.param_groups[0]["lr"]``. Then what was not sent is remembered as a part of the update,
            as published: when the rate changes from a to b, it is weighed by a / b; while it is 0, it waits. If None,
            it is weighed by nothing.
        clip_spikes: How many times the usual length a worker's gradient may have, such as 4, before it is scaled down
            to that and compressed: memories hand out what is left of a spike for many steps, which clipping the average
            cannot undo. What is usual is a running mean over steps, each worker's own; the first 10 are never scaled.
            None for never.
        audit_every: Every so many steps, beginning with the first, gradients are averaged densely, too, beside the
            compressed averages and without changing them, and both are compared: ``handle.audits()``,
            ``handle.stats().audit``, ``handle.write(writer)``, and a line of level INFO from the logger ``"gradwire"``
            on rank 0. 0 for never.
        verify_every: Every so many steps the averages of all ranks are compared; a difference raises
            :class:`gradwire.DivergenceError` on every rank, one step later. Then every payload also carries a checksum,
            all but those of all-reduces, whose sums cannot; one that does not fit raises
            :class:`gradwire.PayloadError`. 0 for never.
        start: Steps that are averaged as ``"dense"`` averages them before the method begins, such as those in which a
            model finds its scale. It begins as if it had been attached then, with nothing remembered.
        inside: How many consecutive ranks are a node, such as 8, or ``"node"`` for as many as torchrun started. The
            workers of a node then average densely among themselves first, each some rows of every tensor, and only
            those averages are compressed and sent between nodes, by the workers that have the same rows. Each
            remembers its rows only. ``"node:bf16"`` or ``"8:bf16"`` sends bfloat16 within the node, and
            ``"8:nearest:8"`` what a codec of ``owner``'s names writes. Tensors with fewer rows than a node has workers,
            and those averaged densely, are averaged over all workers at once. If None, everything is.
        name: What the attachment is called, such as ``"critic"``, where a process trains several models. Ranks that
            attach them in another order are told: by names, shapes and values of parameters, and by this, the only
            thing that tells copies and models of zeros apart.
        **options: The method's hyper-parameters; ``preset="paper"`` takes those, and the other choices, of the
            publication for all that is not given. A schedule has values by step: ``ratio={0: 0.25, 100: 0.01}``.

    Returns:
        A handle with counters and state.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks; the model stays as it was. Later,
            in a backward pass, if a parameter requires gradients that was frozen when the method was attached or was
            not there, or one has another dtype, device or memory format than DDP wrapped it in.

    Example:
        >>> model = DistributedDataParallel(net)
        >>> handle = gradwire.compress(model, "acpsgd", rank=4)
        >>> model(inputs).sum().backward()
        >>> handle.stats().steps
        1

        ``gradwire.compress(model, {"embed*": "topk:ratio=0.01", "*": "acpsgd"}, start=100)``: by name, from step 100.
    """
    choices = Choices.of(locals())
    ddp = unwrapped_model(model) if isinstance(model, nn.Module) else model
    sharded = sharded_model(ddp) if isinstance(ddp, nn.Module) else None
    given = default_group(process_group) if sharded is not None and process_group is not None else None
    group: Any = getattr(ddp, "process_group", None) if sharded is None else sharded.replicas(given)
    with RollCall(group) as roll_call:
        configuration = configure(method, options, choices, roll_call.workers)
        guarding = Guarding(choices)
        if sharded is not None:
            return compress_sharded(sharded, group, configuration, guarding, roll_call)
        model = _checked(model, process_group)
        ignored = ignored_by(model)
        theirs = [(name, each) for name, each in parameters_of(model.module) if id(each) not in ignored]
        parameters = [(name, each) for name, each in theirs if each.requires_grad]
        frozen = [(name, each) for name, each in theirs if not each.requires_grad]
        check_parameters(parameters, GRADIENT_DTYPES)
        check_wrapped(model, parameters)
        handle = Handle(configuration, parameters, model.process_group, roll_call, guarding)
    averages: Buckets | Collected = Buckets(handle, parameters)
    if configuration.whole:
        every = [[name for name, _ in parameters]]
        averages = Collected(handle, parameters, every, model.gradient_as_bucket_view)
    model._comm_hooks.clear()  # of what a copied hook left
    names = {id(each): name for name, each in parameters}
    overlooked = Overlooked(model, parameters, frozen, handle)
    written = [] if model.gradient_as_bucket_view else [each for _, each in parameters]
    hook = _Hook(handle.engine, handle.wire, averages, overlooked, names, written)
    model.register_comm_hook(hook, _on_bucket)
    hooked(handle, parameters)
    return handle


def _checked(given: nn.Module, group: dist.ProcessGroup | DeviceMesh | None) -> DistributedDataParallel:
    """The DDP model in what was given, if it can be attached to."""
    model = unwrapped_model(given) if isinstance(given, nn.Module) else given
    if type(model).__module__.startswith("deepspeed."):
        raise ConfigurationError(
            f"model is a {type(model).__name__}, and DeepSpeed averages by itself, without hooks; at ZeRO's stage 0 "
            "call gradwire.Synchronizer(engine.module, ...).synchronize() between engine.backward, within "
            "engine.no_sync(), and engine.step(); or train the module inside under DDP or FSDP2"
        )
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"model is a {type(given).__name__}; wrap it in torch.nn.parallel.DistributedDataParallel, or call "
            "torch.distributed.fsdp.fully_shard, first; or use gradwire.Synchronizer in your own loop"
        )
    if group is not None:
        raise ConfigurationError(
            "process_group is for models that FSDP2 has sharded; DDP has one of its own, wrap with it"
        )
    if model.mixed_precision is not None:
        raise ConfigurationError(
            "DDP's mixed_precision occupies the communication hook; build DDP without it and use torch.autocast"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigurationError(
            "optimize_ddp='python_reducer' has DDP average without hooks; set 'ddp_optimizer' before you wrap the model"
        )
    if model._delay_all_reduce_params:
        raise ConfigurationError(
            "delay_all_reduce_named_params has DDP average these by itself, and it waits for them only by waiting for "
            "its own averages of the others; leave it out"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ConfigurationError(
            "skip_all_reduce_unused_params has DDP call no hook for some buckets, and where that is the last one of a "
            "step nobody would know of its end; leave it out"
        )
    for hook in [hook.__qualname__ for hook, state in model._comm_hooks if not isinstance(state, _Detached)]:
        raise ConfigurationError(f"the model has the communication hook {hook!r} already; DDP takes one; wrap it anew")
    for name, module in model.module.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigurationError(
                f"{name or 'the wrapped model'} is a DistributedDataParallel itself, which averages densely whatever "
                "is done around it; wrap the model once"
            )
    check_tables(model.module)
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ConfigurationError(
            "the model has gradients of an earlier backward pass; call zero_grad(), then gradwire.compress right after "
            "DDP(...)"
        )
    if int(model._get_ddp_logging_data().get("iteration", 0)) > 0:  # type: ignore[no-untyped-call]
        raise ConfigurationError(
            "the model has run a backward pass already; call gradwire.compress right after DDP(...)"
        )
    return model
