"""Data as newcomers bring it: folders and files that the pages of the documentation call theirs."""

from __future__ import annotations

import json
import textwrap
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw


def photos(root: Path, each: int = 12) -> None:
    """Three classes that differ in colour."""
    rng = np.random.default_rng(0)
    for k, name in enumerate(("leaf", "sky", "soil")):
        (root / name).mkdir(parents=True)
        for i in range(each):
            pixels = rng.integers(0, 120, (70, 80, 3), dtype=np.uint8)
            pixels[..., k] += 120
            Image.fromarray(pixels).save(root / name / f"{i}.jpg")


def draw_person(rng: np.random.Generator) -> tuple[Image.Image, list[tuple[float, float]]]:
    """A figure with COCO's 17 joints: head, then left and right of shoulder, elbow, wrist, hip,
    knee, ankle."""
    x, y = rng.uniform(45, 75), rng.uniform(20, 30)
    head = [(x, y), (x - 3, y - 2), (x + 3, y - 2), (x - 6, y), (x + 6, y)]
    rows = [(12, 10), (18, 26), (16, 40), (9, 45), (10, 65), (11, 82)]
    limbs = [(x + side * w + rng.uniform(-2, 2), y + h) for w, h in rows for side in (-1, 1)]
    image = Image.new("RGB", (120, 130), (30, 40, 60))
    pen = ImageDraw.Draw(image)
    for a, b in ((0, 2), (2, 4), (1, 3), (3, 5), (6, 8), (8, 10), (7, 9), (9, 11), (0, 1), (6, 7)):
        pen.line([limbs[a], limbs[b]], fill=(220, 180, 40 + 15 * a), width=4)
    pen.ellipse([x - 8, y - 8, x + 8, y + 8], fill=(230, 200, 180))
    return image, [*head, *limbs]


def people(root: Path) -> None:
    """Photos and two files of annotations in COCO's form, with only what it must have."""
    rng = np.random.default_rng(1)
    (root / "images").mkdir(parents=True)
    for part, count in (("train", 24), ("val", 6)):
        images, annotations = [], []
        for k in range(count):
            picture, joints = draw_person(rng)
            name, id = f"{part}{k}.jpg", len(images) + 1
            picture.save(root / "images" / name)
            images.append({"id": id, "file_name": name, "width": 120, "height": 130})
            left, top = np.min(joints, 0)
            right, low = np.max(joints, 0)
            annotations.append(
                {
                    "id": id,
                    "image_id": id,
                    "category_id": 1,
                    "keypoints": [v for x, y in joints for v in (x, y, 2)],
                    "num_keypoints": 17,
                    "bbox": [left, top, right - left, low - top],
                    "area": (right - left) * (low - top),
                    "iscrowd": 0,
                }
            )
        kinds = [{"id": 1, "name": "person"}]
        whole = {"images": images, "annotations": annotations, "categories": kinds}
        (root / f"{part}.json").write_text(json.dumps(whole))


FLOWER_TASK = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, Subset

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 8, 3), nn.Linear(8, 2)
        def forward(self, x):
            return self.fc(torch.relu(self.conv(x)).mean((2, 3)))

    class Stripes(Dataset):
        def __len__(self):
            return 240
        def __getitem__(self, k):
            x = torch.rand(1, 12, 12, generator=torch.Generator().manual_seed(k))
            x[0, ::2] += k % 2
            x[0, :, ::2] += 1 - k % 2
            return {"img": x, "label": k % 2}

    def load_data(partition_id, num_partitions):
        mine = list(range(partition_id, 240, num_partitions))
        train, test = Subset(Stripes(), mine[:48]), Subset(Stripes(), mine[48:])
        loader = DataLoader(train, batch_size=16, shuffle=True, num_workers=2)
        return loader, DataLoader(test, batch_size=16)

    def train(net, loader, epochs, device):
        optimizer, criterion = torch.optim.SGD(net.parameters(), lr=0.05), nn.CrossEntropyLoss()
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                criterion(net(batch["img"].to(device)), batch["label"].to(device)).backward()
                optimizer.step()
"""
FLOWER_CLIENT = """
    from flwr.client import ClientApp, NumPyClient
    from task import Net, load_data, train

    class Client(NumPyClient):
        def __init__(self, loaders):
            self.net, (self.train_loader, self.test_loader) = Net(), loaders
        def fit(self, parameters, config):
            train(self.net, self.train_loader, 1, "cpu")
            return [v.numpy() for v in self.net.state_dict().values()], 48, {}

    def client_fn(context):
        config = context.node_config
        return Client(load_data(config["partition-id"], config["num-partitions"])).to_client()

    app = ClientApp(client_fn=client_fn)
"""


def flower_app(root: Path) -> None:
    for name, text in (("task.py", FLOWER_TASK), ("client_app.py", FLOWER_CLIENT)):
        (root / name).write_text(textwrap.dedent(text))


def views(root: Path) -> None:
    """Three photos of one scene, each blurred by a kernel of its own and from pixels beyond its
    edges, as docs/deblurring.md lays them out; the scene itself is there to be compared with."""
    from skimage import data

    scene = data.camera()[::3, ::3].astype(float)
    inside = np.s_[8:-8, 8:-8]
    root.mkdir()
    Image.fromarray(scene[inside].astype(np.uint8)).save(root / "truth.png")
    rng = np.random.default_rng(2)
    for name, (height, width) in (("anna", (1, 7)), ("ben", (7, 1)), ("carla", (5, 5))):
        kernel = np.full((height, width), 1 / (height * width))
        shifted = np.zeros_like(scene)
        shifted[:height, :width] = kernel
        shifted = np.roll(shifted, (-(height // 2), -(width // 2)), (0, 1))
        blurred = np.fft.ifft2(np.fft.fft2(scene) * np.fft.fft2(shifted)).real
        noisy = (blurred + rng.normal(0, 1, scene.shape)).clip(0, 255).round()
        (root / name).mkdir()
        Image.fromarray(noisy[inside].astype(np.uint8)).save(root / name / "observation.png")
        np.save(root / name / "kernel.npy", kernel)


def film(path: Path) -> None:
    """Two seconds in which a bright square crosses a grey ground, with the sound left out."""
    from films import ramp

    from fedlens.data.video.frames import ArrayFrames
    from fedlens.data.video.writer import writer

    pixels: torch.Tensor = ramp(20, 48, 64)
    with writer(path, ArrayFrames(pixels, rate=Fraction(10)), (48, 64)) as write:
        write(pixels)


def my_videos(root: Path) -> None:
    """Four films."""
    root.mkdir()
    for name in ("harbour", "meadow", "stairs", "street"):
        film(root / f"{name}.mp4")


def hands(root: Path) -> None:
    """Annotated photos in one file, without a part to test on; the figures have other joints than
    hands, which the file itself does not know."""
    people(root)
    (root / "train.json").rename(root / "hands.json")
    (root / "val.json").unlink()


def scans(root: Path) -> None:
    """Images with a bright disc, and masks that say where it is."""
    rng = np.random.default_rng(3)
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
    for k in range(20):
        x, y = rng.uniform(20, 44, 2)
        box = (x - 12, y - 12, x + 12, y + 12)
        mask = Image.new("L", (64, 64))
        ImageDraw.Draw(mask).ellipse(box, fill=1)
        image = np.array(mask, dtype=float)[..., None] * 100 + rng.uniform(0, 120, (64, 64, 3))
        Image.fromarray(image.astype(np.uint8)).save(root / "images" / f"{k}.png")
        mask.save(root / "masks" / f"{k}.png")


# Checkpoints: the names and shapes of the published files, with random weights.


def rlfn(path: Path) -> None:
    from fedlens.models import rlfn_ntire

    torch.save(rlfn_ntire().state_dict(), path)


def detector(path: Path) -> None:
    from fedlens.models.fastestdet import FastestDet

    torch.save(FastestDet().state_dict(), path)


def vitpose(path: Path) -> None:
    from fedlens.models import ViTPose

    network = ViTPose("vitpose-s", joints=17, size=(256, 192), patch=16, positions="absolute")
    torch.save({"state_dict": network.state_dict()}, path)


def efficientnet(path: Path) -> None:
    import timm

    torch.save(timm.create_model("tf_efficientnet_lite0").state_dict(), path)
