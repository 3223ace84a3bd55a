"""How each published model of benchmarks/zoo.json is built. A row there has its options as published, and its size."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deqfast import compat

from .models import PEER, Built, Model, Module, imported

Args = argparse.Namespace


def drawn(part: nn.Module, std: float) -> None:
    """Draw the weights from N(0, std^2)."""
    for weight in part.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=std)


def language(file: Module, args: Args, sizes: dict[str, int], tokens: tuple[int, int], cutoffs: list[int]) -> Built:
    """DEQ-LM: a second segment continues the first. cutoffs: of the vocabulary, its size last."""
    vars(args).update(mem=True)
    length = tokens[1]
    model = file.DEQTransformerLM(
        args, cutoffs[-1], 3, dropout=0.05, dropatt=0.0, tgt_len=length, mem_len=length, div_val=4,
        cutoffs=cutoffs[:-1], tie_projs=[False, *[True] * (len(cutoffs) - 1)], **sizes,
    )  # fmt: skip
    drawn(model, 0.02)
    compat.apply_norm(model.func, args=args)
    segments = [torch.randint(cutoffs[-1], (2, *tokens)) for _ in range(2)]

    def call() -> list[Tensor]:
        losses, memory = [], None
        for data, target in segments:
            loss, memory, _ = model(data, target, memory)
            losses.append(loss.mean())
        return losses

    return Built(model, call, lambda losses: torch.stack(losses).sum())


def sequence(file: Module, args: Args) -> Built:
    """DEQ-seq, whose embeddings and injection are from N(0, 1), so that its solves converge."""
    model = file.DEQTransformerLM(
        args, 200, 2, 24, 4, 128, 32, 1024, 0.05, 0.0, div_val=4, tie_projs=[False, True, True, True],
        tgt_len=32, mem_len=32, cutoffs=[50, 100, 150],
    )  # fmt: skip
    drawn(model, 0.01)
    drawn(model.word_emb, 1.0)
    drawn(model.inject_conv, 1.0)
    data, target = torch.randint(200, (2, 4, 32))
    return Built(model, lambda: model(data, target, []), lambda out: out[0].mean() + 0.1 * out[1].mean())


def coordinates(file: Module, args: Args, skip_solver: bool = False) -> Built:
    """DEQ-INR on points of the square [-1, 1] x [-1, 1]."""
    model = file.DEQINR(args, 2, 128, 3)
    points, colours = 2 * torch.rand(400, 2) - 1, 2 * torch.rand(400, 3) - 1
    call = partial(model, points, skip_solver=skip_solver)
    return Built(model, call, lambda out: functional.mse_loss(out["output"], colours))


def multiscale(file: Module, args: Args, config: str, batch: int) -> Built:
    """MDEQ with a configuration of its clone."""
    import yaml

    configs = Path(file.__file__).parents[2] / "configs"
    model = file.get_cls_net(yaml.safe_load((configs / config).read_text()), args)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    loss = partial(corrected, functional.cross_entropy, labels, args)
    return Built(model, lambda: model(images), loss)


def corrected(loss: Any, target: Tensor, args: Args, states: list[Tensor]) -> Tensor:
    """The loss of several states, as torchdeq weighs them."""
    return compat.fp_correction(loss, (states, target), gamma=args.gamma)


def generative(file: Module, args: Args) -> Built:
    """GET, whose last layer starts from N(0, 0.02^2) instead of zeros."""
    vars(args).update(mem=False)
    model = file.GET(args, input_size=16, hidden_size=128, depth=2, num_heads=4)
    drawn(model.final_layer.linear, 0.02)
    noise, images = torch.randn(2, 4, 3, 16, 16)
    return Built(model, lambda: model(noise), partial(corrected, functional.l1_loss, images, args))


def proteins(file: Module, args: Args, nodes: int, edges: int, hidden: int) -> Built:
    """IGNN on a random graph with the features and classes of PPI."""
    model = file.IGNN(args, 50, hidden, 121, None, 0.5, kappa=0.98).to(torch.get_default_dtype())
    graph = torch.sparse_coo_tensor(torch.randint(nodes, (2, edges)), torch.ones(edges), (nodes, nodes))
    features, labels = torch.randn(50, nodes), torch.randint(2, (nodes, 121)).to(torch.get_default_dtype())
    return Built(
        model,
        lambda: model(features, graph),
        lambda out: functional.binary_cross_entropy_with_logits(out, labels),
    )


def flow(file: Module, args: Args, height: int, width: int) -> Built:
    """DEQ-Flow, the base model, with an L1 loss."""
    names = ("tiny", "large", "huge", "gigantic", "gma", "old_version", "mixed_precision", "all_grad")
    vars(args).update(dict.fromkeys(names, False))
    model = file.DEQFlow(args)
    images, truth = 255 * torch.rand(2, 1, 3, height, width), torch.randn(1, 2, height, width)

    def loss(flows: list[Tensor], truth: Tensor, valid: None) -> tuple[Tensor, Tensor]:
        return corrected(functional.l1_loss, truth, args, flows), (flows[-1] - truth).norm(dim=1)

    return Built(model, partial(model, *images, flow_gt=truth, fc_loss=loss), lambda out: out[0])


def diffusion(file: Module, args: Args, size: int, channels: int, steps: int) -> Built:
    """DEQ-DDIM: all steps of a diffusion at once; the gradient is of its states. Its network is in evaluation mode."""
    about = dict(ch=channels, in_channels=3, out_ch=3, ch_mult=[1, 2, 2, 2], num_res_blocks=2, resamp_with_conv=True)
    about |= dict(attn_resolutions=[size // 2], dropout=0.0, type="simple")
    config = SimpleNamespace(model=SimpleNamespace(**about), data=SimpleNamespace(image_size=size))
    config.diffusion = SimpleNamespace(num_diffusion_timesteps=1000)
    network = imported(Path(file.__file__).parents[1], "models.diffusion", PEER).Model(config).requires_grad_(False)
    model = file.DEQLatentSpaceOpt(args, network)
    states = torch.randn(1, 3, size, size).repeat(steps + 1, 1, 1, 1).requires_grad_()
    betas, target = torch.linspace(1e-4, 0.02, 1000), torch.randn(3, size, size)
    times = [int(time) for time in torch.linspace(0, 800**0.5, steps).square()]  # skip_type quad
    given = model.get_ddim_injection(states, times, betas, 1)
    return Built(model, lambda: model(states, given), lambda out: (out[-1] - target).square().sum(), [states])


def sets(file: Module, args: Args, update: str) -> Built:
    """SetDEQ, with the defaults of its class."""
    model = file.SetDEQ(2, update=update)
    points, labels = torch.randn(32, 30, 2), torch.randint(5, (32,))
    return Built(model, lambda: model(points), lambda out: functional.cross_entropy(out[0], labels))


def graph(file: Module, args: Args, name: str, **config: float) -> Built:
    """A model of a grid of 20 x 20 nodes, with the settings of its file."""
    nodes = torch.arange(400).view(20, 20)
    across, down = (nodes[:, :-1], nodes[:, 1:]), (nodes[:-1], nodes[1:])
    once = torch.cat([torch.stack([start.flatten(), end.flatten()]) for start, end in (across, down)], dim=1)
    edges = torch.cat([once, once.flip(0)], dim=1)
    degrees = torch.bincount(edges[0]).to(torch.get_default_dtype())
    settings = file.CFG | config
    model = getattr(file, name)(16, 5, edges, degrees, settings)
    features, labels = torch.randn(400, 16), torch.randint(5, (400,))

    def loss(out: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(out[0], labels) + settings["jac_gamma"] * out[1]

    return Built(model, lambda: model(features, jac=model.training), loss)


def recall(file: Module, args: Args) -> Built:
    """SeqDEQ on 16 sequences of 34 tokens."""
    model = file.SeqDEQ("softmax", "deq")
    tokens, asked, targets = file.gen_mqar(16, 24, torch.Generator(torch.get_default_device()).manual_seed(0))
    loss = lambda out: functional.cross_entropy(out[asked], targets[asked])  # noqa: E731
    return Built(model, lambda: model.run(tokens), loss)


def _model(build: str, given: Mapping[str, Any] = {}, dtype: str = "float64", **about: Any) -> Model:
    """Row of the file; `build` names a function of this module, which takes what is `given`."""
    return Model(**about, build=partial(globals()[build], **given), dtype=getattr(torch, dtype))


ROWS = [_model(**row) for row in json.loads(Path(__file__).parents[1].joinpath("zoo.json").read_text())]
