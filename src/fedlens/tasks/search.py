"""Retrieval over a folder of one's own: `fedlens apply RUN videos/ found/` with what a pretraining run has learned.

Writes into the target folder
    index.safetensors    a row for every video, with the names, the settings and the sha256 of the weights in its header
    neighbours.csv       query, rank, video, similarity
    sheet.png            the first queries and the nearest clips of each
    report.html          the same sheet, to be looked at
An index that was made of the same files with the same weights is used again. Videos that cannot be read, or are shorter than a clip, are
skipped and named. Where videos lie in two or more class folders, the sentence at the end also says how often the nearest one is of the
same class.
"""

from __future__ import annotations

import csv
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.data.source import DataError
from fedlens.data.video import Cache, find_clips
from fedlens.data.videos import Entry, Opened, VideoSet, scan
from fedlens.metrics.retrieval import nearest
from fedlens.tasks.video_ssl import SHOWN, contact_sheet, embed, scores


def search_folder(
    net: Any, frames: int, size: int, source: Path, target: Path, *, weights: Path, clips: int, options: Mapping[str, Any]
) -> str:
    """Every video of `source` asks, those of `gallery` (default: the other ones of `source`) answer. Options: gallery, k, clips."""
    if unknown := sorted(options.keys() - {"gallery", "k", "clips"}):
        raise ValueError(f"retrieval has no option {unknown[0]!r}: gallery, k and clips are known")
    k, clips = int(options.get("k", 5)), int(options.get("clips", clips))
    if k < 1 or clips < 1:
        raise ValueError(f"k and clips are at least 1, not {k} and {clips}")
    place = Path(str(options["gallery"])).expanduser() if options.get("gallery") else None
    target.mkdir(parents=True, exist_ok=True)
    plan = {"frames": frames, "size": size, "clips": clips, "weights": digest(weights)}
    skipped: list[str] = []
    held, rows, again = indexed(net, place or source, target / "index.safetensors", plan, skipped)
    asked, queries = held, rows
    if place is not None:
        asked = videos_of(source, size, frames, skipped)
        queries = embed(net, asked, frames, size, clips)
    if len(held) < 2 and place is None:
        raise DataError(f"{source} holds {len(held)} readable video: there is nothing to compare it with; name others with gallery=FOLDER")
    found, alike = nearest(queries, rows, k, same=place is None)
    names = [c.name for c in held.clips]
    with (target / "neighbours.csv").open("w", newline="") as f:
        table = csv.writer(f)
        table.writerow(("query", "rank", "video", "similarity"))
        for q, film in enumerate(asked.clips):
            table.writerows(
                (film.name, r + 1, names[g], f"{s:.4f}") for r, (g, s) in enumerate(zip(found[q].tolist(), alike[q].tolist(), strict=True))
            )
    folders = class_folders(held)
    write_sheet(asked, held, found, alike, folders, target)
    how = "read from the index" if again else "indexed"
    told = f"{len(held)} videos {how}, the {found.shape[1]} nearest of {len(asked)} are in {target / 'neighbours.csv'}"
    if len(folders) > 1:
        hit = scores(queries, asked, rows, held, same=place is None)["recall_at_1"]
        told += f"; the nearest is of the same folder for {100 * hit:.1f} %"
    return told + (f"; {len(skipped)} skipped ({skipped[0]})" if skipped else "")


def indexed(net: Any, source: Path, file: Path, plan: Mapping[str, Any], skipped: list[str]) -> tuple[VideoSet, Tensor, bool]:
    """The videos and their rows; whether the rows were there already."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    videos = videos_of(source, plan["size"], plan["frames"], skipped)
    header = {"plan": json.dumps(plan, sort_keys=True), "videos": json.dumps([[c.name, len(c)] for c in videos.clips])}
    if file.is_file():
        with safe_open(file, framework="pt") as kept:
            if kept.metadata() == header:
                return videos, kept.get_tensor("rows"), True
    rows = embed(net, videos, plan["frames"], plan["size"], plan["clips"])
    save_file({"rows": rows.contiguous()}, file, metadata=header)
    return videos, rows, False


def videos_of(source: Path, size: int, frames: int, skipped: list[str]) -> VideoSet:
    """The videos of a file or folder, by their paths below it; the folder a video lies in is its class, for whoever sorted them."""
    paths = [source] if source.is_file() else find_clips(source)
    labels = sorted({p.parent.name for p in paths})
    side = round(size * 9 / 7)  # a crop of 8/9 of the short side, as in training
    entries = [Entry(p, p.parent.name, source=str(p)) for p in paths]
    found = scan(entries, labels, Cache(256 << 20), Opened(side), skipped)
    short = [c.name for c in found.clips if len(c) < frames]
    skipped += [f"{name}: shorter than {frames} frames" for name in short]
    out = found.at_least(frames)
    if not len(out):
        raise DataError(f"no video of at least {frames} frames could be read in {source}{' (' + skipped[0] + ')' if skipped else ''}")
    for clip, where in zip(out.clips, out.sources, strict=True):
        clip.name = str(Path(where).relative_to(source)) if source.is_dir() else Path(where).name
    return out


def class_folders(videos: VideoSet) -> Sequence[str]:
    """Names by label, where there are several."""
    names = {y: Path(film).parent.name for y, film in zip(videos.labels, videos.sources, strict=True)}
    return [names.get(k, "") for k in range(max(names) + 1)] if len(names) > 1 else []


def write_sheet(asked: VideoSet, held: VideoSet, found: Tensor, alike: Tensor, classes: Sequence[str], target: Path) -> None:
    """The contact sheet as one PNG, and as a page."""
    from PIL import Image, ImageDraw

    picks = torch.linspace(0, len(asked) - 1, min(SHOWN, len(asked))).long()
    picture = contact_sheet(asked.take(picks.tolist()), held, found[picks], alike[picks], classes)
    columns, w, h = 1 + found.shape[1], 180, 150
    sheet = Image.new("RGB", (columns * w, len(picks) * h), "white")
    pen = ImageDraw.Draw(sheet)
    for n, (image, label) in enumerate(zip(picture.images, picture.labels, strict=True)):
        tile = Image.fromarray((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())
        tile.thumbnail((w - 8, h - 24))
        x, y = n % columns * w, n // columns * h
        sheet.paste(tile, (x + 4, y + 4))
        pen.text((x + 4, y + h - 17), label.replace("✓", "+").replace("·", "-")[:28], fill=(0, 110, 60) if "✓" in label else (60, 60, 60))
    sheet.save(target / "sheet.png")
    head = "<!doctype html><meta charset=utf-8><title>Nearest videos</title>"
    page = f"{head}<h1>Nearest videos</h1><p>{html.escape(picture.caption)}</p><img src=sheet.png>"
    (target / "report.html").write_text(page)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
