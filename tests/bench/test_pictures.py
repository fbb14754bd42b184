"""Pictures: what can be read in them."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from gradwire import ConfigurationError
from gradwire_bench import pictures


def test_names_cover_neither_each_other_nor_points() -> None:
    """Of points in a heap, as methods of one size and loss are."""
    figure, axes = pictures.axes_of((6, 4))
    noise = torch.Generator().manual_seed(0)
    heap = torch.randn(40, 2, generator=noise).mul_(torch.tensor([0.2, 0.05])).tolist()
    places = [*heap, [1.0, 1.0], [1.0, 1.0]]
    axes.plot(*zip(*places, strict=True), "o")
    notes = pictures.label_points(figure, axes, [(x, y, f"a method, number {i}") for i, (x, y) in enumerate(places)])
    figure.draw_without_rendering()
    boxes = [note.get_window_extent() for note in notes]
    assert len(boxes) == len(places)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert not any(box.count_contains(axes.transData.transform(places)) for box in boxes)


def test_a_picture_that_cannot_be_written_is_told(tmp_path) -> None:
    figure, _ = pictures.axes_of((6, 4))
    with pytest.raises(ConfigurationError, match="File name too long; choose another path"):
        pictures.save(figure, tmp_path / f"{'a' * 300}.png")
