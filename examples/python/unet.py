"""A 3-D UNet in plain PyTorch. Nothing here knows about sharding."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class UNet(nn.Module):
    """Halves the volume `len(channels) - 1` times and comes back. Extents need
    not be even: halving rounds up, and the way back restores the skip's size.

        model = UNet(channels=(8, 16, 32), classes=3)
        model(torch.randn(1, 1, 73, 91, 78)).shape   # (1, 3, 73, 91, 78)

    norm: "group" or "batch"; activation: "silu" or "relu"; down: "conv" (stride
    2) or "pool"; up: "trilinear" or "transpose"; checkpointing recomputes each
    block in backward instead of keeping what is inside it.
    """

    def __init__(
        self,
        channels=(8, 16, 32),
        classes=3,
        norm="group",
        activation="silu",
        down="conv",
        up="trilinear",
        checkpointing=False,
    ):
        super().__init__()
        style = {"norm": norm, "activation": activation}
        fine, coarse = channels[:-1], channels[1:]
        levels = list(zip(fine, coarse, strict=True))
        self.first = block(1, channels[0], **style)
        self.downs = nn.ModuleList(DOWN[down](f, c) for f, c in levels)
        self.encoders = nn.ModuleList(block(c, c, **style) for c in coarse)
        self.ups = nn.ModuleList(UP[up](c, f) for f, c in levels)
        self.decoders = nn.ModuleList(block(2 * f, f, **style) for f in fine)
        self.head = nn.Conv3d(channels[0], classes, 1)
        self.checkpointing = checkpointing

    def forward(self, x):
        x = self.run(self.first, x)
        skips = []
        for down, encoder in zip(self.downs, self.encoders, strict=True):
            skips.append(x)
            x = self.run(encoder, down(x))
        for up, decoder in zip(
            reversed(self.ups), reversed(self.decoders), strict=True
        ):
            skip = skips.pop()
            x = self.run(decoder, torch.cat([skip, up(x, skip.shape[2:])], 1))
        return self.head(x)

    def run(self, module, x):
        if self.checkpointing and self.training:
            return checkpoint(module, x, use_reentrant=False)
        return module(x)


def block(inputs, outputs, norm, activation):
    """Twice convolution, norm, activation."""
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1, bias=False),
        NORM[norm](outputs),
        ACTIVATION[activation](),
        nn.Conv3d(outputs, outputs, 3, padding=1, bias=False),
        NORM[norm](outputs),
        ACTIVATION[activation](),
    )


NORM = {"group": lambda channels: nn.GroupNorm(4, channels), "batch": nn.BatchNorm3d}
ACTIVATION = {"silu": nn.SiLU, "relu": nn.ReLU}


# ---- halving and doubling ---------------------------------------------------


class StrideDown(nn.Conv3d):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 3, stride=2, padding=1)


class PoolDown(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.MaxPool3d(2, ceil_mode=True), nn.Conv3d(inputs, outputs, 1))


class TrilinearUp(nn.Conv3d):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 1)

    def forward(self, x, size):
        return F.interpolate(super().forward(x), size=size, mode="trilinear")


class TransposeUp(nn.ConvTranspose3d):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 3, stride=2, padding=1)

    def forward(self, x, size):
        return super().forward(x, output_size=size)


DOWN = {"conv": StrideDown, "pool": PoolDown}
UP = {"trilinear": TrilinearUp, "transpose": TransposeUp}


# ---- the loss ---------------------------------------------------------------


def segmentation_loss(logits, labels):
    """Cross-entropy plus one minus the mean Dice overlap of the classes.
    logits: (N, classes, ...); labels: (N, ...), class numbers, or -100 where
    the class is not to be learnt from."""
    cross_entropy = F.cross_entropy(logits, labels, ignore_index=-100)
    return cross_entropy + 1 - dice(logits.softmax(1), labels).mean()


def dice(probabilities, labels):
    """The overlap of each class where labels has one: 1 where prediction and
    truth agree."""
    classes = torch.arange(probabilities.shape[1], device=labels.device)
    truth = labels.unsqueeze(1) == classes.view(-1, *[1] * (labels.dim() - 1))
    dims = [0, *range(2, probabilities.dim())]
    overlap = (probabilities * truth).sum(dims)
    predicted = (probabilities * (labels >= 0).unsqueeze(1)).sum(dims)
    return (2 * overlap + 1) / (predicted + truth.sum(dims) + 1)
