"""A vision transformer for fields on a grid: patches, attention, patches back."""

import torch.nn.functional as F
from torch import nn

from shardtensor.nn.functional import neighborhood_attention


class OceanViT(nn.Module):
    """(B, channels, latitude, longitude) -> (B, 1, latitude, longitude): the first
    channel, and what the model adds to it. `window` is the number of patches along
    latitude and longitude that a patch attends to; None: all."""

    def __init__(self, channels, width=96, depth=4, heads=4, patch=(2, 4), window=None):
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.blocks = nn.ModuleList(Block(width, heads, window) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.ConvTranspose2d(width, 1, patch, stride=patch)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, fields):
        grid = self.embed(fields).movedim(1, -1)
        for block in self.blocks:
            grid = block(grid)
        return fields[:, :1] + self.head(self.norm(grid).movedim(-1, 1))


class Block(nn.Module):
    def __init__(self, width, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, grid):
        grid = grid + self.out(self.attend(self.norm1(grid)))
        return grid + self.mlp(self.norm2(grid))

    def attend(self, grid):
        """Over (B, rows, columns, width)."""
        query, key, value = self.qkv(grid).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        if self.window:
            return neighborhood_attention(query, key, value, self.window).flatten(-2)
        tokens = (x.flatten(1, 2).transpose(1, 2) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(*tokens)
        return attended.transpose(1, 2).flatten(-2).unflatten(1, grid.shape[1:3])
