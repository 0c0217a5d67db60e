"""VMAF through ffmpeg's libvmaf. The ffmpeg that imageio-ffmpeg ships has the filter and the model
vmaf_v0.6.1 built in.

Frames go to ffmpeg as 8-bit RGB and become yuv420p there, like the PNG files of the usual
evaluation. Identical clips do not score 100 but about 99.7, because the first frame has no motion.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor


def vmaf(prediction: Tensor, target: Tensor, rate: int = 30) -> float:
    """Mean VMAF of a clip against its reference.

    Args:
        prediction: a clip (T, 3, H, W) in [0, 1].
        target: the reference, of the same shape.
        rate: frames a second.
    """
    if prediction.shape != target.shape:
        raise ValueError(
            f"clips differ in shape: {tuple(prediction.shape)} and {tuple(target.shape)}"
        )
    ffmpeg = find_ffmpeg()
    h, w = prediction.shape[-2:]
    with tempfile.TemporaryDirectory(prefix="fedlens-vmaf-") as scratch:
        folder = Path(scratch)
        for name, clip in (("ours", prediction), ("reference", target)):
            raw = (
                (clip.detach().float().clamp(0, 1) * 255)
                .round()
                .to(torch.uint8)
                .permute(0, 2, 3, 1)
                .contiguous()
                .cpu()
            )
            (folder / f"{name}.rgb").write_bytes(raw.numpy().tobytes())
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{w}x{h}", "-r", str(rate), "-i"]
        graph = (
            "[0:v]format=yuv420p[a];[1:v]format=yuv420p[b];"
            "[a][b]libvmaf=log_fmt=json:log_path=out.json:n_threads=1"
        )
        command = [
            ffmpeg,
            "-hide_banner",
            *source,
            "ours.rgb",
            *source,
            "reference.rgb",
            "-lavfi",
            graph,
            "-f",
            "null",
            "-",
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode or not (folder / "out.json").exists():
            last = done.stderr.strip().splitlines()[-1:] or ["no output"]
            raise RuntimeError(f"ffmpeg could not compute VMAF: {last[0]}")
        return float(
            json.loads((folder / "out.json").read_text())["pooled_metrics"]["vmaf"]["mean"]
        )


def find_ffmpeg() -> str:
    try:
        import imageio_ffmpeg
    except ImportError as e:
        raise ValueError('VMAF needs an ffmpeg with libvmaf: pip install "fedlens[video]"') from e
    path: str = imageio_ffmpeg.get_ffmpeg_exe()
    return path
