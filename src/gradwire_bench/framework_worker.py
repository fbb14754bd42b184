"""One rank of ``gradwire bench train`` in another framework: the image task's network, by Keras' fit or by optax."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire_bench.contenders import Contender
from gradwire_bench.nets.image import CLASSES
from gradwire_bench.optimizers import one_cycle
from gradwire_bench.tasks import Task
from gradwire_bench.train_worker import evaluated, main, peak_rate, share_right
from gradwire_bench.worker import attempted, emit, interface_sent_bytes, mean_over_ranks
from gradwire_bench.workloads import Workload

Batches = Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


def network() -> keras.Model:
    """The layers of :class:`gradwire_bench.nets.ConvNet`, channels last."""
    layers = keras.layers

    def block(layer: Any) -> list[Any]:
        return [layer, layers.BatchNormalization(momentum=0.9, epsilon=1e-5), layers.ReLU()]

    convolutions = [[*block(layers.Conv2D(n, 3, padding="same")), layers.MaxPooling2D()] for n in (32, 64)]
    dense = [layers.Flatten(), *block(layers.Dense(384)), layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((28, 28, 1)), *convolutions[0], *convolutions[1], *dense])


class Scores(nn.Module):
    """A network of Keras', as the tasks ask it."""

    def __init__(self, answer: Callable[[np.ndarray[Any, Any]], Any]) -> None:
        super().__init__()
        self._answer = answer

    def forward(self, images: Tensor) -> Tensor:
        """``float32[B, classes]`` for ``float32[B, 1, side, side]``."""
        return torch.from_numpy(np.array(self._answer(images.movedim(1, 3).numpy())))


class Course:
    """A training as it goes: times its steps, and tells the parent."""

    def __init__(self, number: int, job: dict[str, Any], task: Task) -> None:
        self._number, self._job, self._task = number, job, task
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.interface_bytes = 0

    def begin(self) -> None:
        """To be called before a step."""
        self._sent = interface_sent_bytes() if self._job["shaped"] else 0
        self._begun = time.perf_counter()

    def end(self, loss: Any, scores: nn.Module) -> None:
        """To be called after it; evaluations count neither in its seconds nor in its bytes."""
        self.losses.append(float(loss))
        self.seconds.append(time.perf_counter() - self._begun)
        self.interface_bytes += interface_sent_bytes() - self._sent if self._job["shaped"] else 0
        step, accuracy = len(self.seconds), None
        if samples := evaluated(step, self._job["steps"]):
            accuracy = share_right(scores, self._task, samples)
        if dist.get_rank() == 0:
            told = {"elapsed": sum(self.seconds), "loss": self.losses[-1], "accuracy": accuracy}
            emit("step", row=self._number, step=step, **told)


def by_fit(net: Any, rates: list[float], contender: Contender, course: Course, batches: Batches) -> tuple[Any, Scores]:
    """Trains by ``fit``."""
    import gradwire.keras

    class Rates(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
        def __call__(self, step: Any) -> Any:
            return keras.ops.take(np.array(rates, np.float32), keras.ops.minimum(step, len(rates) - 1))

    class Told(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            course.begin()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            mean = float(logs["loss"])  # of all steps so far
            course.end((batch + 1) * mean - sum(course.losses), scores)

    def answer(images: np.ndarray[Any, Any]) -> Any:
        if keras.backend.backend() == "jax":
            net.jax_state_sync()
        return net.predict_on_batch(images)

    scores = Scores(answer)
    net.compile(keras.optimizers.SGD(Rates()), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    handle = gradwire.keras.compress(net, contender.name, **contender.arguments())
    net.fit(batches, steps_per_epoch=len(rates), verbose=0, callbacks=[Told()])
    return handle, scores


def by_optax(
    net: Any, rates: list[float], contender: Contender, course: Course, batches: Batches
) -> tuple[Any, Scores]:
    """Trains by a step compiled by JAX, and optax."""
    import jax
    import jax.numpy as jnp
    import optax

    import gradwire.jax

    trained, others = gradwire.jax.broadcast(
        tuple([each.value for each in part] for part in (net.trainable_variables, net.non_trainable_variables))
    )
    handle = gradwire.jax.Synchronizer(trained, contender.name, **contender.arguments())
    optimizer = optax.chain(handle.transformation(), optax.sgd(lambda step: jnp.asarray(rates)[step]))
    state = optimizer.init(trained)

    def loss_of(trained: Any, others: Any, images: Any, labels: Any) -> Any:
        logits, others = net.stateless_call(trained, others, images, training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), others

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(trained: Any, others: Any, state: Any, images: Any, labels: Any) -> Any:
        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained, others, images, labels)
        updates, state = optimizer.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), others, state, loss

    compiled = jax.jit(lambda trained, others, images: net.stateless_call(trained, others, images)[0])
    scores = Scores(lambda images: compiled(trained, others, images))
    for _ in rates:
        course.begin()
        trained, others, state, loss = step(trained, others, state, *next(batches))
        course.end(loss, scores)
    return handle, scores


WAYS = {"keras-tf": by_fit, "keras-jax": by_fit, "jax": by_optax}


def learning_rates(peak: float, steps: int) -> Iterator[float]:
    """As torch's schedule has them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))])
    schedule = one_cycle(optimizer, peak, steps)
    for _ in range(steps):
        yield float(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def train(number: int, method: str, job: dict[str, Any], workload: Workload, task: Task) -> None:
    """As in :mod:`gradwire_bench.train_worker`."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(job["seed"])
    net, contender, course = network(), Contender.parse(method), Course(number, job, task)
    rates = list(learning_rates(peak_rate(contender, workload, job), job["steps"]))
    batches = ((images.movedim(1, 3).numpy(), labels.numpy()) for images, labels in task.batches())
    dist.barrier()
    trained = attempted(number, lambda: WAYS[job["framework"]](net, rates, contender, course, batches))
    if trained is None:
        return
    handle, scores = trained
    steps = len(course.seconds)
    stats = handle.stats()
    metered = mean_over_ranks(stats.wire_bytes) / steps
    interface = mean_over_ranks(course.interface_bytes) / steps if job["shaped"] else None
    accuracy = share_right(scores, task, None)
    handle.close()
    if dist.get_rank() == 0:
        emit(
            "result",
            row=number,
            step_seconds=course.seconds,
            metered_bytes=metered,
            interface_bytes=interface,
            dense_bytes=stats.dense_bytes / steps,
            accuracy=accuracy,
            losses=course.losses,
            phases={stage: total / steps for stage, total in stats.seconds.items()},
            peak_bytes=None,
            parameters=None,
        )


if __name__ == "__main__":
    main(train)
