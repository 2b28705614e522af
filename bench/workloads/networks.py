"""Define networks of the shapes of GPT-2 small and ResNet-50, for random data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workloads.common import Batch


@dataclass(frozen=True)
class GPT2:
    """Size GPT-2 (Radford et al. 2019), by default its small version."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    positions: int = 1024
    batch: int = 8

    def network(self) -> nn.Module:
        return LanguageModel(self)

    def data(self, device: torch.device) -> Batch:
        """Make tokens and the tokens that follow them, both [batch, positions]."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.positions + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Add causal attention and an MLP, each after a norm, to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class LanguageModel(nn.Module):
    """Map tokens [batch, positions] to logits [batch, positions, vocabulary].

    Weights start as N(0, 0.02), and the output embedding is the input embedding.
    """

    def __init__(self, sizes: GPT2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.zeros(sizes.positions, sizes.width))
        blocks = (Block(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(sizes.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens) + self.positions)
        return F.linear(self.norm(x), self.tokens.weight)


@dataclass(frozen=True)
class ResNet50:
    """Size ResNet-50 (He et al. 2015).

    The 3 x 3 convolutions have the stride, and each block's last norm starts at 0 (Goyal et al.
    2017).
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    side: int = 224
    classes: int = 1000
    batch: int = 64

    def network(self) -> nn.Module:
        layers: list[nn.Module] = [
            *(nn.Conv2d(3, self.width, 7, 2, 3, bias=False), nn.BatchNorm2d(self.width), nn.ReLU()),
            nn.MaxPool2d(3, 2, 1),
        ]
        inputs = self.width
        for stage, count in enumerate(self.blocks):
            inner = self.width << stage
            for place in range(count):
                layers.append(Bottleneck(inputs, inner, 2 if stage and not place else 1))
                inputs = 4 * inner
        head = nn.Linear(inputs, self.classes)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)

    def data(self, device: torch.device) -> Batch:
        """Make images [batch, 3, side, side] and labels [batch]."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.batch, 3, self.side, self.side, generator=generator)
        labels = torch.randint(self.classes, (self.batch,), generator=generator)
        return images.to(device), labels.to(device)

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)


class Bottleneck(nn.Module):
    """Add convolutions 1 x 1, 3 x 3 and 1 x 1 with 4 * `inner` outputs to the input.

    The input passes through a 1 x 1 convolution where its shape changes.
    """

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()

        def convolved(inputs: int, outputs: int, side: int, stride: int = 1) -> list[nn.Module]:
            layer = nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False)
            return [layer, nn.BatchNorm2d(outputs)]

        self.body = nn.Sequential(
            *(*convolved(inputs, inner, 1), nn.ReLU()),
            *(*convolved(inner, inner, 3, stride), nn.ReLU()),
            *convolved(inner, 4 * inner, 1),
        )
        nn.init.zeros_(self.body[-1].weight)
        changes = stride != 1 or inputs != 4 * inner
        self.beside = nn.Sequential(*convolved(inputs, 4 * inner, 1, stride) if changes else ())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.beside(x))
