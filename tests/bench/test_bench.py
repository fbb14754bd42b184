"""The benchmarks, short: real worker processes, real gradients, real images."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.errors import ConfigurationError
from gradwire_bench import data, origin, pictures, report, shapes, sync, text, train
from gradwire_bench.cell import Cell
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.nets import ByteNet, ConvNet
from gradwire_bench.tasks import CONTEXT, ImageTask, Share
from gradwire_bench.workloads import LANGUAGE
from pool import ranks

DIGITS = data.DataSource(data.DIGITS, None, "for the test")


def test_resnet50_has_its_161_tensors_and_25_557_032_parameters():
    named = shapes.get("resnet50")
    assert len(named) == len(dict(named)) == 161
    assert shapes.numel(named) == 25_557_032
    assert named[0] == ("conv1.weight", (64, 3, 7, 7))
    assert dict(named)["layer2.0.downsample.0.weight"] == (512, 256, 1, 1)
    assert dict(named)["layer4.2.conv2.weight"] == (512, 512, 3, 3)
    assert named[-2:] == (("fc.weight", (1000, 2048)), ("fc.bias", (1000,)))


def test_shaped_model_delivers_the_prepared_gradient_uncopied_and_another_one_each_step():
    named = shapes.get("tiny")
    count = shapes.numel(named)
    noise = shapes.Noise(count, seed=0)
    model = shapes.ShapedModel(named, torch.zeros(count), noise)
    seen = []
    for step in (1, 2):
        model.zero_grad(set_to_none=True)
        model(step).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        shared = noise.values.untyped_storage().data_ptr()
        assert all(gradient.untyped_storage().data_ptr() == shared for gradient in gradients)
        assert [tuple(gradient.shape) for gradient in gradients] == [shape for _, shape in named]
        seen.append(torch.cat([gradient.flatten() for gradient in gradients]))
    torch.testing.assert_close(seen[0].std(), torch.tensor(1.0), atol=0.02, rtol=0)
    assert not torch.equal(*seen)


def test_shaped_model_delivers_the_last_layer_first():
    named = shapes.get("tiny")
    count = shapes.numel(named)
    model = shapes.ShapedModel(named, torch.zeros(count), shapes.Noise(count, seed=0))
    order = []
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    model(1).backward()
    assert order == sorted(order, reverse=True)


def test_digits_are_there_without_download():
    images = data.load(data.locate("digits"))
    assert images.train_images.shape == (1437, 1, 8, 8)
    assert images.test_images.shape == (360, 1, 8, 8)
    assert images.train_images.max() == 255
    assert set(images.train_labels) == set(images.test_labels) == set(range(10))


def test_fashion_mnist_is_70_000_images_where_it_is():
    directory = data.find_fashion_mnist()
    if directory is None:
        pytest.skip("Fashion-MNIST is not on this machine; `gradwire bench train` downloads it")
    images = data.load(data.DataSource(data.FASHION_MNIST, directory, "for the test"))
    assert images.train_images.shape == (60_000, 1, 28, 28)
    assert images.test_images.shape == (10_000, 1, 28, 28)
    assert [int((images.train_labels == label).sum()) for label in range(10)] == [6000] * 10


def test_without_fashion_mnist_digits_are_used_and_the_reason_said(monkeypatch):
    def refuse():
        raise subprocess.CalledProcessError(100, ["apt-get"], stderr="E: Unable to locate package\nmore")

    monkeypatch.setattr(data, "find_fashion_mnist", lambda: None)
    monkeypatch.setattr(data, "_download_fashion_mnist", refuse)
    source = data.locate("auto")
    assert source.name == data.DIGITS
    assert "E: Unable to locate package" in source.reason
    with pytest.raises(ConfigurationError, match="use --dataset digits"):
        data.locate("fashion-mnist")


def test_text_is_the_standard_library_and_test_files_are_not_trained_on():
    source = text.locate()
    content = text.load(source)
    assert len(content.train) > 1_000_000
    assert 0.02 < len(content.test) / len(content.train) < 0.5
    assert b"import" in content.train.tobytes()
    assert content.test[:512].tobytes() not in content.train.tobytes()


def test_language_model_reads_a_byte_and_is_asked_for_the_next():
    task = LANGUAGE.task(text.locate(), Share(3, seed=0, world_size=2))
    inputs, wanted = next(task.batches())
    assert inputs.shape == (3, CONTEXT)
    assert torch.equal(inputs[:, 1:].flatten(), wanted.view(3, CONTEXT)[:, :-1].flatten())
    net = ByteNet()
    assert sum(parameter.numel() for parameter in net.parameters()) == 113_664
    score = task.score(net, 8)
    assert score.seen == 4 * CONTEXT  # this worker's half
    assert score.nats / score.seen == pytest.approx(math.log(256), rel=0.05)  # nothing learnt yet


def test_workers_share_out_each_batch_in_the_same_order_for_every_run():
    images = data.load(DIGITS)

    def first_epoch(rank):
        task = ImageTask(images, Share(16, 3, rank, 2))
        batches = task.batches()
        return [next(batches) for _ in range(len(images.train_images) // 32)]

    mine, again, other = first_epoch(0), first_epoch(0), first_epoch(1)
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(mine, again, strict=True))
    assert mine[0][0].shape == (16, 1, 28, 28)
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(mine, other, strict=True))
    model = ConvNet()
    shares = [ImageTask(images, Share(16, 3, r, 2)).score(model, 101).seen for r in range(2)]
    assert sum(shares) == 101


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("ddp", "DDP fp32"),
        ("acpsgd:rank=8", "acpsgd rank=8"),
        ("topk:ratio=0.001", "topk ratio=0.001"),
        ("torch-powersgd:rank=4", "torch powerSGD_hook rank=4"),
    ],
)
def test_contender_reads_what_it_writes(text, label):
    contender = Contender.parse(text)
    assert str(contender) == text
    assert contender.label == label


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("acpsgdd", "acpsgd"),
        ("acpsgd:rang=4", "rang"),
        ("acpsgd:rank", "'rank' is not option=value"),
        ("acpsgd:rank=0", "0"),
        ("ddp:rank=4", "ddp has no option 'rank'"),
        ("torch-powersgd:rank=0", "rank=0"),
    ],
)
def test_contender_quotes_what_is_wrong(text, quoted):
    with pytest.raises(ConfigurationError, match=quoted):
        Contender.parse(text)


@ranks(1)
def test_contender_that_goes_by_samples_is_told_their_squares():
    for per, least in (("samples", 2.0), ("microbatches", 0.0), ("step", 0.0)):
        contender = Contender.parse(f"variance:moments={per},dense_below=1")
        averaged = contender.wrap(torch.nn.Linear(3, 1, bias=False), dist.group.WORLD)
        images = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])  # the gradients of the two take each other away
        averaged.model(images).sum().backward()
        kept = averaged.handle.state_dict()["tensors"]
        assert ("squares" in kept) == (per != "step")
        assert kept["second_moments"]["weight"].flatten().tolist() == pytest.approx([0.999 * least] * 3), per
        averaged.close()


def test_sync_always_has_the_baseline_and_each_contender_once():
    racers = sync.contenders(["topk", "topk", "ddp"])
    assert [str(racer) for racer in racers] == [DDP, "topk"]
    assert set(method for _, method in sync.TARGETS) < set(sync.DEFAULT_METHODS)


@pytest.mark.usefixtures("begun_quickly")
def test_sync_measures_every_contender_and_keeps_the_row_of_one_that_fails(tmp_path):
    racers = sync.contenders(["dense", "acpsgd:rank=2", "torch-powersgd", "topk:inside=3"])
    progress = []
    cells = [Cell("sync", "tiny", str(racer), workers=2, steps=4) for racer in racers]
    rows = sync.race(cells, lambda so_far: progress.append(len(so_far)))
    assert progress
    *measured, broken = rows
    for row in measured:
        assert row.error is None
        assert len(row.seconds) == 4
        assert 0 < row.median_seconds < 10
        assert row.ratio_to_ddp == pytest.approx(rows[0].median_seconds / row.median_seconds)
    assert broken.seconds == []
    assert "inside=3" in broken.error
    by_method = {row.method: row for row in rows}
    gradient_bytes = 4 * shapes.numel(shapes.get("tiny"))
    assert by_method["dense"].metered_bytes == pytest.approx(gradient_bytes, rel=0.01)  # 2 (n - 1) / n of it, n = 2
    assert by_method["acpsgd:rank=2"].metered_bytes < gradient_bytes / 10

    document = origin.document("bench.gpu", rows=rows)
    origin.write_json(tmp_path / "new folder" / "gpu.json", document)
    read = json.loads((tmp_path / "new folder" / "gpu.json").read_text())
    assert read["schema"] == "gradwire.bench.gpu/1"
    assert {"date", "command", "machine"} < set(read)
    assert read["machine"]["torch"] == torch.__version__
    assert read["rows"][0]["median_seconds"] == rows[0].median_seconds


def test_a_machine_that_tells_no_memory_is_named_without(monkeypatch):
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    facts = origin.machine()
    assert facts["memory_gib"] is None
    assert "GiB" not in origin.machine_line()
    assert origin.hardware(facts) == f"{facts['cpu']}, {facts['cores']} cores"
    assert origin.hardware({**facts, "memory_gib": 23.5}).endswith(" cores, 23.5 GiB")


def test_targets_are_compared_with_the_measured_ratio():
    rows = [
        sync.SyncRow("ddp", "DDP fp32", "1gbit", seconds=[1.0]),
        sync.SyncRow("torch-powersgd:rank=4", "torch", "1gbit", seconds=[0.5]),
        sync.SyncRow("powersgd:rank=4", "powersgd", "1gbit", seconds=[0.19]),
        sync.SyncRow("acpsgd:rank=4", "acpsgd", "1gbit", seconds=[0.05]),
        sync.SyncRow("topk:ratio=0.01", "topk", "1gbit", error="broken"),
    ]
    sync._compare(rows, "resnet50", 4, 1_000_000_000)
    assert [row.reached for row in rows] == [None, None, False, True, False]  # powersgd: 5.3 x DDP, only 2.6 x torch
    assert math.isclose(rows[2].ratio_to_torch_powersgd, 0.5 / 0.19)
    assert "missed" in _text(report.sync_table(rows, "a title"))


@pytest.mark.usefixtures("begun_quickly")
def test_training_race_learns_and_leaves_pictures(tmp_path):
    racers = train.contenders(["acpsgd:rank=4"])
    cells = [Cell("train", "image", str(racer), workers=2, steps=40, batch=32) for racer in racers]
    rows = train.race(cells, DIGITS, lambda rows: None)
    for row in rows:
        assert row.error is None
        assert len(row.step_seconds) == len(row.losses) == 40
        assert [point.step for point in row.curve] == [10, 20, 30, 40]
        assert row.accuracy > 0.6
        assert row.losses[-1] < row.losses[0]
    dense, acpsgd = rows
    assert dense.ratio == 1
    assert acpsgd.ratio > 10
    assert dense.losses[0] == acpsgd.losses[0]  # the same start and the same first batch
    drawn = pictures.train_plots(rows, tmp_path, "a test")
    assert [path.name for path in drawn] == ["accuracy_over_time.png", "step_time.png", "accuracy_over_bytes.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert "acpsgd" in _text(report.train_table(rows, "a title"))


def test_json_that_cannot_be_written_is_an_error_with_the_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot write .*file/a\.json"):
        origin.write_json(Path(tmp_path / "file" / "a.json"), {})


def _text(table):
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
