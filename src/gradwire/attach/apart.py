"""Gradients that share memory, which autograd gives the terms of a sum: averages cannot be written to both."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradwire.attach.shards import local


def take_apart(parameters: Iterable[nn.Parameter]) -> None:
    """Has all gradients in memory of their own: copies those that share any with another, or whose elements do."""
    spans: list[tuple[int, int, int, nn.Parameter]] = []
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            continue
        part = local(gradient)
        if span := part.nbytes if _without_gaps(part) else _span(part):
            spans.append((part.data_ptr(), span, number, parameter))
        elif part.numel():
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
    stop = 0
    for start, span, _, parameter in sorted(spans):
        if start >= stop:
            stop = start + span
        elif parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def _without_gaps(tensor: Tensor) -> bool:
    """Whether it is in one of the usual memory formats, which is asked first because it is quicker."""
    images = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return images or tensor.is_contiguous()


def _span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last; 0 if elements may share memory."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return 0
            reach += (size - 1) * stride
    return reach * tensor.element_size()
