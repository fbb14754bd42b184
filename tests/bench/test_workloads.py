"""What is trained: every model learns its data, workers share it out, and loaders know the files they were made for."""

import gzip
import hashlib
import io
import json
import tarfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gradwire.errors import ConfigurationError
from gradwire_bench import data, ratings, trial
from gradwire_bench.nets import VGG16, AlexNet, ResNet9, ResNet20
from gradwire_bench.ratings import Ratings
from gradwire_bench.tasks import CANDIDATES, NEGATIVES, PixelTask, RatingTask, Score, Share, Task
from gradwire_bench.workloads import NAMES, WORKLOADS

DIGITS = data.DataSource(data.DIGITS, None, "for the test")
RECORD = 1 + 3 * 32 * 32


def made_up_ratings() -> Ratings:
    """Every user likes the items of his own half."""
    order = np.random.default_rng(0)
    rated = np.zeros((ratings.USERS, ratings.ITEMS), np.bool_)
    users, items = order.integers(0, ratings.USERS, 20_000), order.integers(0, ratings.ITEMS // 2, 20_000)
    items += (users % 2) * (ratings.ITEMS // 2)
    rated[users, items] = True
    pairs = np.argwhere(rated)
    last = np.append(pairs[1:, 0] != pairs[:-1, 0], True)
    return Ratings(pairs[~last], pairs[last], rated)


def task_of(name: str, rank: int, world_size: int) -> Task:
    workload = WORKLOADS[name]
    batch = workload.batch // world_size
    if workload.kind == "ratings":
        return RatingTask(made_up_ratings(), Share(batch, 3, rank, world_size))
    source = workload.locate("digits")
    return workload.task(source, Share(batch, 3, rank, world_size))


@pytest.mark.parametrize("name", NAMES)
def test_every_model_learns_from_its_data(name: str) -> None:
    workload, task = WORKLOADS[name], task_of(name, 0, 1)
    torch.manual_seed(0)
    net = workload.small()
    optimizer = torch.optim.AdamW(net.parameters(), workload.adam_rate)
    before = task.score(net.eval(), 40)
    net.train()
    losses = []
    for inputs, wanted in islice(task.batches(), 12):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), wanted)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-3:]) < losses[0]
    after = task.score(net.eval(), 40)
    assert before.seen > 0
    assert 0 <= after.correct <= after.seen
    assert len(wanted) % len(inputs) in (0, len(wanted))


@pytest.mark.parametrize("name", NAMES)
def test_workers_share_out_batches_and_scores(name: str) -> None:
    whole, parts = task_of(name, 0, 1), [task_of(name, rank, 2) for rank in range(2)]
    inputs, wanted = next(whole.batches())
    shares = [next(part.batches()) for part in parts]
    each = len(inputs) // WORKLOADS[name].batch
    rows = inputs.view(len(inputs) // each, each, -1)
    for rank, (mine, answers) in enumerate(shares):
        assert torch.equal(mine.view(-1, each, *rows.shape[2:]), rows[rank::2])
        assert torch.equal(answers.view(len(rows) // 2, -1), wanted.view(len(rows), -1)[rank::2])
    torch.manual_seed(0)
    net = WORKLOADS[name].small().eval()
    total = sum((part.score(net, 40) for part in parts), Score(0, 0, 0.0))
    alone = whole.score(net, 40)
    assert (total.correct, total.seen) == (alone.correct, alone.seen)
    assert total.nats == pytest.approx(alone.nats, rel=1e-4)


@pytest.mark.parametrize(
    ("net", "count"), [(ResNet20, 269_434), (ResNet9, 6_571_978), (AlexNet, 4_359_882), (VGG16, 14_722_890)]
)
def test_nets_have_the_shapes_of_their_papers(net: type[torch.nn.Module], count: int) -> None:
    made = net()
    assert sum(each.numel() for each in made.parameters()) == count
    assert made(torch.zeros(2, 1, 32, 32)).shape == (2, 10)
    assert net(colours=3, classes=7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_masks_are_of_what_is_on_top() -> None:
    task = PixelTask(data.load(DIGITS), Share(4, seed=0))
    canvases, mask = next(task.batches())
    assert mask.max() <= 10
    assert torch.equal(mask.view(4, 48, 48) > 0, canvases[:, 0] > canvases.min())


def test_unrated_items_are_unrated() -> None:
    made = made_up_ratings()
    users = np.arange(50)
    found = made.unrated(users, CANDIDATES, np.random.default_rng(1))
    assert not made.rated[users[:, None], found].any()
    inputs, wanted = next(RatingTask(made, Share(8, seed=0)).batches())
    assert wanted.view(8, 1 + NEGATIVES).sum(1).eq(1).all()
    assert made.rated[inputs[wanted == 1][:, 0], inputs[wanted == 1][:, 1]].all()


def test_ratings_are_read_from_either_file_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(2, 5, 3, 20), (1, 4, 5, 11), (1, 7, 1, 10), (2, 6, 4, 30)]
    digest = hashlib.sha256(np.array(sorted(rows), "<i8").tobytes()).hexdigest()
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"take u\.data from https://files\.grouplens\.org"):
        ratings.locate()
    folder = tmp_path / "ml-100k"
    folder.mkdir()
    for name, head in (
        ("ml-100k.inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"),
        ("u.data", ""),
    ):
        (folder / name).write_text(head + "".join("\t".join(map(str, row)) + "\n" for row in rows))
        read = ratings.load(ratings.locate(), digest)
        assert read.train.tolist() == [[0, 6], [1, 4]]
        assert read.test.tolist() == [[0, 3], [1, 5]]
    with pytest.raises(ConfigurationError, match="is not MovieLens-100k"):
        ratings.load(ratings.locate())


def archive(folder: Path, records: int, left_out: str = "", cut: int = 0) -> tuple[Path, str]:
    """An archive of CIFAR-10's form, and its MD5."""
    path = folder / data.CIFAR10_ARCHIVE
    with tarfile.open(path, "w:gz") as made:
        for number, name in enumerate((*(f"data_batch_{each}.bin" for each in range(1, 6)), "test_batch.bin")):
            content = np.zeros((records, RECORD), np.uint8)
            content[:, 0] = number
            content[:, 1 : 1 + 1024] = 255  # red
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = content.size - cut
            if name != left_out:
                made.addfile(info, io.BytesIO(content.tobytes()[: info.size]))
    return path, hashlib.md5(path.read_bytes()).hexdigest()


def test_cifar10_is_read_in_its_own_form(tmp_path: Path) -> None:
    images = data.load_cifar10(*archive(tmp_path, 3))
    assert np.asarray(images.train_images).shape == (15, 3, 32, 32)
    assert np.asarray(images.test_images).shape == (3, 3, 32, 32)
    assert images.train_labels.tolist() == [label for label in range(5) for _ in range(3)]
    assert images.test_labels.tolist() == [5, 5, 5]
    assert np.asarray(images.train_images).mean((0, 2, 3)).tolist() == [255, 0, 0]
    path, digest = archive(tmp_path, 3, left_out="data_batch_4.bin")
    with pytest.raises(ConfigurationError, match=r"lacks data_batch_4\.bin"):
        data.load_cifar10(path, digest)
    path, digest = archive(tmp_path, 3, cut=1)
    with pytest.raises(ConfigurationError, match="no whole records of 3073"):
        data.load_cifar10(path, digest)
    with pytest.raises(ConfigurationError, match="not c32a1d4ab5d03f1284b67883e8d87530"):
        data.load_cifar10(path)


def made_up_folders(folder: Path) -> Path:
    """Two classes of photographs, one dark and one bright, in ImageNet's form."""
    from PIL import Image

    order = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 3)):
        for number, name in enumerate(("n01440764", "n01443537")):
            (folder / part / name).mkdir(parents=True)
            for each in range(count):
                pixels = order.integers(190 * number, 190 * number + 60, (90, 70 + each, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{name}_{each}.JPEG")
    return folder


def test_folders_of_photographs_are_read_and_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"imagenet needs train and val, each with a folder a class"):
        data.locate("imagenet")
    folder = made_up_folders(tmp_path / "imagenet")
    source = data.locate("imagenet")
    assert (source.colours, source.classes) == (3, 2)
    assert data.DataSource.of(json.loads(json.dumps(source.plain()))) == source
    images = data.load(source)
    assert images.train_labels.tolist() == [0] * 12 + [1] * 12
    assert np.asarray(images.train_images[3:5]).shape == (2, 3, 64, 64)
    dark, bright = np.asarray(images.test_images[:3]), np.asarray(images.test_images[3:])
    assert dark.max() < 128 < bright.min()
    plan = trial.Trial("vgg16", "adamw", 2, "ddp", 0.001, 0)
    trained = trial.run(plan, 2, lambda step: None, dataset="imagenet", batch=4)
    assert trained.dense_bytes == 4 * sum(each.numel() for each in VGG16(8, colours=3, classes=2).parameters())
    assert 6 * trained.accuracy in range(7)
    with pytest.raises(ConfigurationError, match="composes items on black"):
        WORKLOADS["unet"].locate("imagenet")
    first = next((folder / "train" / "n01440764").iterdir())
    first.write_bytes(b"no image")
    with pytest.raises(ConfigurationError, match="is no image that can be read"):
        np.asarray(data.load(source).train_images)
    for each in (folder / "val" / "n01443537").iterdir():
        each.unlink()
    with pytest.raises(ConfigurationError, match="n01443537 has no image"):
        data.load(source)
    (folder / "val" / "n01443537").rmdir()
    with pytest.raises(ConfigurationError, match="only one of them has n01443537"):
        data.locate("imagenet")


def test_cifar10_that_is_not_there_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"cifar-10-binary\.tar\.gz \(170 MB\) there"):
        data.locate("cifar10")


def test_images_that_are_others_are_refused(tmp_path: Path) -> None:
    content = b"\0\0\x08\x01" + (4).to_bytes(4, "big") + bytes(4)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").write_bytes(gzip.compress(content))
    source = data.DataSource(data.FASHION_MNIST, tmp_path, "for the test")
    with pytest.raises(ConfigurationError, match="remove it and run again"):
        data.load(source)
    whole = gzip.compress(content)
    for broken in (whole[:-9], whole[:4], b"no archive", whole[:10] + b"\xff" * 9):
        for each in tmp_path.iterdir():
            each.write_bytes(broken)
        with pytest.raises(ConfigurationError, match=r"cannot be unpacked: .*; remove it and run again"):
            data.load(source)
