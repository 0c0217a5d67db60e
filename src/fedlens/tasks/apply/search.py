"""Retrieval over a folder of one's own: `fedlens apply RUN videos/ found/` with what a pretraining
run has learned.

Writes into the target folder
    index.safetensors    a row for every video that can be decoded; its header has the names, the
                         settings and the sha256 of the weights
    neighbours.csv       query, rank, video, similarity
    sheet.png            the first queries and the nearest clips of each
    report.html          the same sheet, to be looked at, and what was skipped and why
An index that was made of the same files (names, sizes, times of change) with the same weights is
used again. Videos that cannot be read, or are shorter than a clip, are skipped and named. Where
videos lie in two or more class folders, the sentence at the end also says how often the nearest one
is of the same class.
"""

from __future__ import annotations

import csv
import hashlib
import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.core.files import atomic_path
from fedlens.core.picture import Picture, to_uint8
from fedlens.data.paths import clips_at
from fedlens.data.source import DataError
from fedlens.data.video.frame_cache import Cache
from fedlens.data.video.lists import Entry
from fedlens.data.video.video_set import VideoSet
from fedlens.data.video.videos import OpenFiles, scan
from fedlens.metrics.retrieval import most_similar
from fedlens.tasks.retrieval import SHEET_QUERIES, contact_sheet, embed_all, retrieval_scores

THUMBNAIL = 120  # pixels of the shorter side of a picture on a sheet


def search_folder(
    net: Any,
    frames: int,
    size: int,
    source: Path,
    target: Path,
    *,
    weights: Path,
    clips: int,
    options: Mapping[str, Any],
) -> str:
    """Every video of `source` asks, those of `gallery` (default: the other ones of `source`)
    answer. Options: gallery, k, clips.
    """
    k, clips = (
        check_count(name, options.get(name, usual)) for name, usual in (("k", 5), ("clips", clips))
    )
    place = Path(str(options["gallery"])).expanduser() if options.get("gallery") else None
    target.mkdir(parents=True, exist_ok=True)
    plan = {"frames": frames, "size": size, "clips": clips, "weights": weights_digest(weights)}
    skipped: list[str] = []
    # One numbering of folders for both sides: a query's class is a matter of its folder's name, not
    # of its place among its neighbours.
    folders = sorted({p.parent.name for s in {place or source, source} for p in clips_at(s)})
    held, rows, again = index_videos(
        net, place or source, folders, target / "index.safetensors", plan, skipped
    )
    asked, queries = held, rows
    if place is not None:
        asked = videos_of(source, folders, size, frames, skipped)
        queries, seen = embed_all(net, asked, frames, size, clips)
        asked, queries = keep_decoded(asked, seen, skipped), queries[seen]
    if len(held) < 2 and place is None:
        raise DataError(
            f"{source} holds {len(held)} readable video: there is nothing to compare it with; name"
            " others with gallery=FOLDER"
        )
    found, alike = most_similar(queries, rows, k, same=place is None)
    names = [c.name for c in held.clips]
    with (target / "neighbours.csv").open("w", newline="") as f:
        table = csv.writer(f)
        table.writerow(("query", "rank", "video", "similarity"))
        for q, film in enumerate(asked.clips):
            table.writerows(
                (film.name, r + 1, names[g], f"{s:.4f}")
                for r, (g, s) in enumerate(zip(found[q].tolist(), alike[q].tolist(), strict=True))
            )
    classes = named_folders(held, folders)
    write_sheet(asked, held, found, alike, classes, target, skipped)
    how = "read from the index" if again else "indexed"
    sentence = (
        f"{len(held)} videos {how}, the {found.shape[1]} nearest of {len(asked)} are in"
        f" {target / 'neighbours.csv'}"
    )
    if classes and set(asked.labels) & set(held.labels):
        hit = retrieval_scores(queries, asked, rows, held, same=place is None)["recall_at_1"]
        sentence += f"; the nearest is of the same folder for {100 * hit:.1f} %"
    return sentence + (
        f"; {len(skipped)} skipped ({'; '.join(skipped[:3])}{'; ...' if len(skipped) > 3 else ''})"
        if skipped
        else ""
    )


def check_count(name: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a whole number of at least 1, not {value!r}")
    return value


def index_videos(
    net: Any,
    source: Path,
    folders: Sequence[str],
    file: Path,
    plan: Mapping[str, Any],
    skipped: list[str],
) -> tuple[VideoSet, Tensor, bool]:
    """The videos and their rows; whether the rows were there already."""
    videos = videos_of(source, folders, plan["size"], plan["frames"], skipped)
    files = video_stamps(videos)
    kept = read_index(file, plan, files)
    if kept is None:
        rows, seen = embed_all(net, videos, plan["frames"], plan["size"], plan["clips"])
        rows = rows[seen]
        write_index(
            file,
            plan,
            rows,
            [files[n] for n in seen],
            [f for n, f in enumerate(files) if n not in set(seen)],
        )
    else:
        rows, seen = kept
    return keep_decoded(videos, seen, skipped), rows, kept is not None


def video_stamps(videos: VideoSet) -> list[list[Any]]:
    """Name, frames, bytes and time of change of each: what tells whether it is still the same."""
    stamps = [Path(s).stat() for s in videos.sources]
    return [
        [c.name, len(c), stamp.st_size, stamp.st_mtime_ns]
        for c, stamp in zip(videos.clips, stamps, strict=True)
    ]


def read_index(
    file: Path, plan: Mapping[str, Any], files: Sequence[list[Any]]
) -> tuple[Tensor, list[int]] | None:
    """The rows, and the numbers of the videos they are for, if the index was made of these files in
    this way. One that cannot be read is none: it can be made again."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as kept:
            header, rows = kept.metadata() or {}, kept.get_tensor("rows")
        made, videos, broken = (json.loads(header[key]) for key in ("plan", "videos", "broken"))
    except (SafetensorError, OSError, ValueError, KeyError):
        return None
    seen = [n for n, f in enumerate(files) if f not in broken]
    same = made == dict(plan) and [files[n] for n in seen] == videos and len(rows) == len(seen)
    return (rows, seen) if same and len(videos) + len(broken) == len(files) else None


def write_index(
    file: Path,
    plan: Mapping[str, Any],
    rows: Tensor,
    videos: Sequence[list[Any]],
    broken: Sequence[list[Any]],
) -> None:
    """Broken ones have no row, but are named: otherwise every search would try to decode them, and
    everything else, again. The file takes its name when it is complete."""
    from safetensors.torch import save_file

    header = {
        "plan": json.dumps(plan, sort_keys=True),
        "videos": json.dumps(videos),
        "broken": json.dumps(broken),
    }
    with atomic_path(file) as part:
        save_file({"rows": rows.contiguous()}, part, metadata=header)


def keep_decoded(videos: VideoSet, seen: Sequence[int], skipped: list[str]) -> VideoSet:
    """Those that gave clips; the first frame of the others is sound, but what comes after is
    not.
    """
    skipped += [
        f"{c.name}: cannot be decoded" for n, c in enumerate(videos.clips) if n not in set(seen)
    ]
    return videos.take(seen)


def videos_of(
    source: Path, folders: Sequence[str], size: int, frames: int, skipped: list[str]
) -> VideoSet:
    """The videos of a file or folder, by their paths below it; the folder a video lies in is its
    class, for whoever sorted them.
    """
    side = round(size * 9 / 7)  # as in training
    entries = [Entry(p, p.parent.name, source=str(p)) for p in clips_at(source)]
    bad: list[str] = []
    found = scan(entries, folders, Cache(256 << 20), OpenFiles(side), bad)
    bad += [f"{c.name}: shorter than {frames} frames" for c in found.clips if len(c) < frames]
    out = found.at_least(frames)
    if not len(out):
        raise DataError(
            f"no video of at least {frames} frames could be read in"
            f" {source}{' (' + bad[0] + ')' if bad else ''}"
        )
    skipped += bad
    for clip, where in zip(out.clips, out.sources, strict=True):
        clip.name = str(Path(where).relative_to(source)) if source.is_dir() else Path(where).name
    return out


def named_folders(videos: VideoSet, folders: Sequence[str]) -> Sequence[str]:
    """Names by label, where the videos lie in several folders; a folder none of them lies in has no
    name.
    """
    here = set(videos.labels)
    return [name if y in here else "" for y, name in enumerate(folders)] if len(here) > 1 else []


def write_sheet(
    asked: VideoSet,
    held: VideoSet,
    found: Tensor,
    alike: Tensor,
    classes: Sequence[str],
    target: Path,
    skipped: Sequence[str],
) -> None:
    """The contact sheet as one PNG, and as a page."""
    picks = torch.linspace(0, len(asked) - 1, min(SHEET_QUERIES, len(asked))).long()
    picture = contact_sheet(asked.take(picks.tolist()), held, found[picks], alike[picks], classes)
    draw_sheet(picture, 1 + found.shape[1]).save(target / "sheet.png")
    head = "<!doctype html><meta charset=utf-8><title>Nearest videos</title>"
    page = (
        f"{head}<h1>Nearest"
        f" videos</h1><p>{html.escape(picture.caption.partition(': ')[2])}.</p><img src=sheet.png>"
    )
    if skipped:
        page += f"<p>Skipped:</p><ul>{''.join(f'<li>{html.escape(line)}' for line in skipped)}</ul>"
    (target / "report.html").write_text(page)


def draw_sheet(picture: Picture, columns: int) -> Any:
    """Rows of `columns` pictures, their short sides `THUMBNAIL` pixels, with whole labels below."""
    from PIL import Image, ImageDraw, ImageFont, ImageOps

    font = ImageFont.load_default(13)
    tiles = []
    for image in picture.images:
        tile = Image.fromarray(to_uint8(image))
        short, long = sorted(tile.size)
        if long > 3 * short:  # a very long one shows its middle
            tile = ImageOps.fit(tile, (min(tile.width, 3 * short), min(tile.height, 3 * short)))
        by = THUMBNAIL / min(tile.size)
        tiles.append(tile.resize((round(tile.width * by), round(tile.height * by))))
    width = max(THUMBNAIL + 30, *(t.width for t in tiles))
    plain = [label.replace("✓", "+").replace("·", "-") for label in picture.labels]
    texts = [wrapped(text, width, font.getlength) for text in plain]
    tall = max(t.height for t in tiles) + 18 * max(t.count("\n") + 1 for t in texts) + 14
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * (width + 12), rows * tall), "white")
    pen = ImageDraw.Draw(sheet)
    for n, (tile, text) in enumerate(zip(tiles, texts, strict=True)):
        x, y = n % columns * (width + 12) + 6, n // columns * tall + 6
        sheet.paste(tile, (x, y))
        hit = picture.labels[n].startswith("✓")
        pen.text(
            (x, y + tile.height + 3), text, fill=(0, 110, 60) if hit else (60, 60, 60), font=font
        )
    return sheet


def wrapped(text: str, width: float, length: Callable[[str], float]) -> str:
    """Lines no wider than `width`: broken at spaces, in a word only where it does not fit alone."""
    lines = [""]
    for word in text.split():
        for piece in _pieces(word, width, length):
            joined = f"{lines[-1]} {piece}".strip()
            if length(joined) <= width:
                lines[-1] = joined
            else:
                lines.append(piece)
    return "\n".join(line for line in lines if line)


def _pieces(word: str, width: float, length: Callable[[str], float]) -> list[str]:
    pieces = [""]
    for letter in word:
        if pieces[-1] and length(pieces[-1] + letter) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def weights_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
