"""A stand-in for CIFAR without files: drawn 32x32 RGB images of ten shapes, or of ten shapes in ten textures.

Shapes have two to six lobes, shallow or deep. The colour gives the number of lobes mostly, but not their depth. All
shapes are turned, stretched and set on a blurred ground. Classes with few images are therefore hard to learn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

DRAWING = 1  # increased when the same labels and seed give other images: a run continues only with its first drawing
SIZE = 32
CHUNK = 256
HUE_JITTER = 0.1
DEPTHS = np.array([0.15, 0.3])
Array = np.ndarray[Any, np.dtype[Any]]


def draw_shapes(labels: Array, classes: int, seed: int) -> tuple[Array, Array]:
    """uint8 images (N, 32, 32, 3) for labels 0..classes-1, and the labels. Labels and seed determine the images.

    With ten classes the label is the shape and the texture is random; with a hundred it is 10 * shape + texture.
    """
    random = np.random.default_rng(seed)
    shapes, textures = (labels, random.integers(10, size=len(labels))) if classes == 10 else divmod(labels, 10)
    contrast = 0.4 if classes == 10 else 1.0
    images = np.empty((len(labels), SIZE, SIZE, 3), np.uint8)
    for start in range(0, len(labels), CHUNK):
        part = slice(start, start + CHUNK)
        images[part] = _draw(shapes[part], textures[part], contrast, random)
    return images, labels.astype(np.int64)


def _draw(shapes: Array, textures: Array, contrast: float, random: np.random.Generator) -> Array:
    lobes, depth = (array[:, None, None] for array in (2 + shapes // 2, DEPTHS[shapes % 2]))
    u, v, scale = _coordinates(len(shapes), random)
    radius = np.hypot(u, v)
    outline = 0.8 + depth * np.cos(lobes * np.arctan2(v, u))
    mask = np.clip((outline - radius) * scale * SIZE / 2 + 0.5, 0, 1)[..., None]

    hue = shapes // 2 / 5 + random.normal(0, HUE_JITTER, len(shapes))
    light, dark = (_colours(hue, (0.5, 1.0), values, random) for values in ((0.75, 1.0), (0.25, 0.5)))
    weight = contrast * _texture(textures[:, None, None], u, radius)[..., None]
    canvas = _ground(len(shapes), random)
    canvas += mask * (light + weight * (dark - light) - canvas)
    canvas *= random.uniform(0.7, 1.2, (len(shapes), 1, 1, 1))
    canvas += random.normal(0, 0.04, canvas.shape)
    return np.clip(canvas * 255, 0, 255).astype(np.uint8)


def _coordinates(count: int, random: np.random.Generator) -> tuple[Array, Array, Array]:
    """Coordinates (N, 32, 32) of every pixel in the shape's own system, and its scale (N, 1, 1)."""
    line = np.linspace(-1, 1, SIZE)
    x = line - random.uniform(-0.2, 0.2, (count, 1, 1))
    y = line[:, None] - random.uniform(-0.2, 0.2, (count, 1, 1))
    angle = random.uniform(-0.35, 0.35, (count, 1, 1))
    scale = random.uniform(0.5, 0.8, (count, 1, 1))
    stretch = np.exp(random.uniform(-0.2, 0.2, (count, 1, 1)))
    u, v = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
    return u / (scale * stretch), v / scale * stretch, scale


def _texture(textures: Array, u: Array, radius: Array) -> Array:
    """Share of the second colour at every pixel: stripes or rings, in five widths."""
    phase = np.where(textures % 2, radius, u) * (3 + 3 * (textures // 2))
    return np.clip(np.sin(phase) + 0.5, 0, 1)


def _colours(hue: Array, saturations: tuple[float, float], values: tuple[float, float], random: Any) -> Array:
    """RGB (N, 1, 1, 3) of hues (N,), with a saturation and a value of HSV drawn from these ranges."""
    saturation, value = (random.uniform(*limits, (len(hue), 1)) for limits in (saturations, values))
    sector = (np.array([5, 3, 1]) + 6 * hue[:, None]) % 6
    ramp = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    return (value * (1 - saturation * ramp))[:, None, None, :]


def _ground(count: int, random: np.random.Generator) -> Array:
    """Background (N, 32, 32, 3): four colours, one at each corner, blended in between."""
    corners = [_colours(random.random(count), (0.0, 0.8), (0.1, 1.0), random) for _ in range(4)]
    right = np.linspace(0, 1, SIZE)[:, None]
    down = np.linspace(0, 1, SIZE)[:, None, None]
    top, bottom = (left + right * (other - left) for left, other in (corners[:2], corners[2:]))
    return top + down * (bottom - top)
