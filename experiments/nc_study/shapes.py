"""A stand-in for CIFAR that needs no files: drawn 32x32 RGB images of ten shapes, or of ten shapes in ten textures.

The shapes come in pairs that resemble each other (disc and hexagon, square and pentagon, ...), turned, stretched,
recoloured, partly covered and set before clutter, so that a class with few images is hard to tell from its neighbour.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SIZE = 32
ANGLES = 512
CHUNK = 256
HUE_JITTER = 0.1
SHAPES = ("disc", "star", "square", "triangle", "ring", "open ring", "hexagon", "trefoil", "pentagon", "flower")
TEXTURES = ("plain", "stripes", "bands", "checks", "dots", "circles", "spokes", "shade", "glow", "waves")

Array = np.ndarray[Any, np.dtype[Any]]


def draw_shapes(labels: Array, classes: int, seed: int) -> tuple[Array, Array]:
    """uint8 images (N, 32, 32, 3) for labels 0..classes-1, and the labels: the same for the same labels and seed.

    Of ten classes the label is the shape and the texture is chance; of a hundred it is 10 * shape + texture.
    """
    random = np.random.default_rng(seed)
    texture_by_chance = random.integers(len(TEXTURES), size=len(labels))
    shapes, textures = (labels, texture_by_chance) if classes == 10 else (labels // 10, labels % 10)
    contrast = 0.4 if classes == 10 else 1.0
    images = np.empty((len(labels), SIZE, SIZE, 3), np.uint8)
    for start in range(0, len(labels), CHUNK):
        part = slice(start, start + CHUNK)
        images[part] = _draw(shapes[part], textures[part], contrast, random)
    return images, labels.astype(np.int64)


def _draw(shapes: Array, textures: Array, contrast: float, random: np.random.Generator) -> Array:
    count = len(shapes)
    canvas = _background(count, random)
    for _ in range(2):
        canvas = _cover(canvas, _blob(count, random, smallest=0.12, largest=0.3), _colour(count, random, 1.0))
    mask, u, v = _object(shapes, random)
    first, second = _shape_colours(shapes, random)
    weight = contrast * _texture(textures, u, v)[..., None]
    canvas = _cover(canvas, mask, first * (1 - weight) + second * weight)
    canvas = _cover(canvas, _bar(count, random), _colour(count, random, 1.0))
    gain = random.uniform(0.7, 1.2, (count, 1, 1, 1)).astype(np.float32)
    noise = random.standard_normal(canvas.shape, np.float32) * 0.04
    return np.clip((canvas * gain + noise) * 255, 0, 255).astype(np.uint8)


def _cover(canvas: Array, mask: Array, colour: Array) -> Array:
    return canvas + mask[..., None] * (colour - canvas)


def _rgb(hue: Array, saturation: Array, value: Array) -> Array:
    """Colours (N, 1, 1, 3) from hues, saturations and values (N,)."""
    sector = (np.array([5, 3, 1]) + 6 * hue[:, None]) % 6
    ramp = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    return (value[:, None] * (1 - saturation[:, None] * ramp)).astype(np.float32)[:, None, None, :]


def _colour(count: int, random: np.random.Generator, saturation: float) -> Array:
    """Any hue, up to a saturation."""
    return _rgb(random.random(count), random.uniform(0, saturation, count), random.uniform(0.1, 1, count))


def _shape_colours(shapes: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """A light and a dark colour. The hue tells a pair of shapes from most others, and never the two of a pair apart."""
    count = len(shapes)
    hue = (shapes // 2) / 5 + random.normal(0, HUE_JITTER, count)
    saturation = random.uniform(0.5, 1, count)
    light, dark = random.uniform(0.75, 1, count), random.uniform(0.25, 0.5, count)
    swap = random.random(count) < 0.5
    return _rgb(hue, saturation, np.where(swap, dark, light)), _rgb(hue, saturation, np.where(swap, light, dark))


def _grid(count: int, random: np.random.Generator, reach: float) -> tuple[Array, Array]:
    """Coordinates in [-1, 1] about a centre drawn within `reach` of the middle, (N, 32, 32) each."""
    line = np.linspace(-1, 1, SIZE, dtype=np.float32)
    centre = random.uniform(-reach, reach, (2, count, 1, 1)).astype(np.float32)
    x = np.broadcast_to(line[None, None, :] - centre[0], (count, SIZE, SIZE))
    y = np.broadcast_to(line[None, :, None] - centre[1], (count, SIZE, SIZE))
    return x, y


def _turn(x: Array, y: Array, angle: Array) -> tuple[Array, Array]:
    angle = angle.astype(np.float32)[:, None, None]
    cos, sin = np.cos(angle), np.sin(angle)
    return cos * x + sin * y, cos * y - sin * x


def _background(count: int, random: np.random.Generator) -> Array:
    x, y = _grid(count, random, 0.5)
    along, _ = _turn(x, y, random.uniform(0, 2 * np.pi, count))
    weight = np.clip(along * 0.5 + 0.5, 0, 1)[..., None]
    return _colour(count, random, 0.5) * (1 - weight) + _colour(count, random, 0.5) * weight


def _blob(count: int, random: np.random.Generator, smallest: float, largest: float) -> Array:
    """Clutter: an ellipse somewhere."""
    x, y = _turn(*_grid(count, random, 1.0), random.uniform(0, 2 * np.pi, count))
    radii = random.uniform(smallest, largest, (2, count, 1, 1)).astype(np.float32)
    return np.clip((1 - np.hypot(x / radii[0], y / radii[1])) * 4, 0, 1)


def _bar(count: int, random: np.random.Generator) -> Array:
    """An occluder: a strip across the image at a random place and angle."""
    x, _ = _turn(*_grid(count, random, 0.6), random.uniform(0, 2 * np.pi, count))
    width = random.uniform(0.0, 0.12, (count, 1, 1)).astype(np.float32)
    return np.clip((width - np.abs(x)) * SIZE / 2 + 0.5, 0, 1) * (width > 0.04)


def _outlines() -> tuple[Array, Array]:
    """Outer and inner radius of every shape at every angle, two tables (10, ANGLES)."""
    angle = np.arange(ANGLES) * 2 * np.pi / ANGLES

    def polygon(sides: int) -> Array:
        step = 2 * np.pi / sides
        return np.cos(step / 2) / np.cos(angle % step - step / 2)

    saw = np.abs((angle * 5 / (2 * np.pi)) % 1 - 0.5) * 2
    one, none = np.ones(ANGLES), np.zeros(ANGLES)
    outer = {
        "disc": 0.9 * one,
        "hexagon": polygon(6),
        "square": polygon(4) * 1.1,
        "pentagon": polygon(5) * 1.05,
        "triangle": polygon(3) * 1.2,
        "trefoil": 0.7 + 0.35 * np.cos(3 * angle),
        "star": 0.5 + 0.55 * saw,
        "flower": 0.75 + 0.25 * np.cos(6 * angle),
        "ring": one,
        "open ring": np.where(angle > 0.9, 1.0, 0.0),
    }
    inner = {"ring": 0.55 * one, "open ring": 0.55 * one}
    tables = [outer[name] for name in SHAPES], [inner.get(name, none) for name in SHAPES]
    return np.asarray(tables[0], np.float32), np.asarray(tables[1], np.float32)


OUTER, INNER = _outlines()


def _object(shapes: Array, random: np.random.Generator) -> tuple[Array, Array, Array]:
    """Coverage of the shape, and its own coordinates."""
    count = len(shapes)
    x, y = _turn(*_grid(count, random, 0.2), random.uniform(-0.35, 0.35, count))
    scale = random.uniform(0.5, 0.8, (count, 1, 1)).astype(np.float32)
    stretch = np.exp(random.uniform(-0.2, 0.2, (count, 1, 1))).astype(np.float32)
    u, v = x / (scale * stretch), y / scale * stretch
    radius = np.hypot(u, v)
    angle = ((np.arctan2(v, u) + np.float32(2 * np.pi)) * np.float32(ANGLES / (2 * np.pi))).astype(np.int32) % ANGLES
    row = shapes[:, None, None]
    sharpness = scale * SIZE / 2
    mask = np.clip((OUTER[row, angle] - radius) * sharpness + 0.5, 0, 1)
    hole = np.clip((INNER[row, angle] - radius) * sharpness + 0.5, 0, 1)
    return mask * (1 - hole), u, v


def _texture(textures: Array, u: Array, v: Array) -> Array:
    """Share of the second colour at every pixel."""
    weight = np.empty_like(u)
    for index, name in enumerate(TEXTURES):
        chosen = textures == index
        weight[chosen] = _pattern(name, u[chosen], v[chosen])
    return weight


def _pattern(name: str, u: Array, v: Array) -> Array:
    radius = np.hypot(u, v)
    wave = {
        "plain": lambda: np.full_like(u, -1),
        "stripes": lambda: np.sin(9 * u),
        "bands": lambda: np.sin(5 * v),
        "checks": lambda: np.sin(6 * u) * np.sin(6 * v) * 3,
        "dots": lambda: np.cos(8 * u) + np.cos(8 * v) - 0.8,
        "circles": lambda: np.sin(11 * radius),
        "spokes": lambda: np.sin(6 * np.arctan2(v, u)),
        "shade": lambda: u,
        "glow": lambda: 1 - 2 * radius,
        "waves": lambda: np.sin(8 * u + 2 * np.sin(4 * v)),
    }[name]
    return np.clip(wave() + 0.5, 0, 1)
