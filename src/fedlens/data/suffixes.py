"""Which files are images or videos: the only lists of their suffixes. Reading a run folder needs
one of them, so nothing is imported here.
"""

from __future__ import annotations

# still images that PIL opens
IMAGE_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm",
)  # fmt: skip
HEIC_SUFFIXES = (".heic", ".heif")  # with pillow-heif
BROWSER_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")  # of those, what every browser shows
# what PyAV opens; where a list leaves the suffix out, they are tried in this order
VIDEO_SUFFIXES = (
    ".mp4", ".avi", ".mkv", ".webm", ".mov", ".m4v", ".mpg", ".mpeg", ".y4m",
)  # fmt: skip
