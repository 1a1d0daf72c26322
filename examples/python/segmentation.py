"""A 3-D UNet that learns the tissues of one brain volume."""

import torch
from unet import UNet, segmentation_loss


class Segmentation:
    """A job of training.py. Nothing here knows whether the volume is sharded."""

    def __init__(self, args, volume, labels):
        self.args, self.volume, self.labels = args, volume, labels
        self.device = volume.device

    def warm_up(self):
        """One step of a model of its own on a few slices: what a process loads
        and opens with its first step is no part of training."""
        few = 2**self.args.levels
        start = Segmentation(self.args, self.volume[..., :few], self.labels[..., :few])
        start.start()
        start.step(0)

    def start(self):
        self.model = make_model(self.args).to(self.device)
        # Squares of the first steps' gradients are large; 0.95 soon forgets them.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        return self.optimizer

    def step(self, number):
        self.optimizer.zero_grad()
        with self.autocast():
            loss = segmentation_loss(self.model(self.volume), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def predict(self):
        """The class of each voxel."""
        # Batch statistics, as in training: running ones lag after so few steps.
        with self.autocast():
            return self.model(self.volume).argmax(1)

    def autocast(self):
        device = self.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.args.bf16)


def make_model(args):
    """The same weights in every process, from the seed."""
    torch.manual_seed(args.seed)
    return UNet(
        channels=[args.channels * 2**level for level in range(args.levels)],
        norm=args.norm,
        activation=args.activation,
        down=args.down,
        up=args.up,
        checkpointing=args.checkpoint,
    )
