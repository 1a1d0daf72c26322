"""Fourier neural operators as they are written everywhere."""

import copy

import torch

import shardtensor


class Spectral(torch.nn.Module):
    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        shape = (channels, channels, modes, modes)
        self.upper = torch.nn.Parameter(torch.randn(shape, dtype=torch.cdouble))
        self.lower = torch.nn.Parameter(torch.randn(shape, dtype=torch.cdouble))

    def forward(self, x):
        batch, channels, height, width = x.shape
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        shape = batch, channels, height, width // 2 + 1
        out = torch.zeros(*shape, dtype=torch.cdouble, device=x.device)
        product = "bixy,ioxy->boxy"
        out[:, :, :m, :m] = torch.einsum(product, spectrum[:, :, :m, :m], self.upper)
        out[:, :, -m:, :m] = torch.einsum(product, spectrum[:, :, -m:, :m], self.lower)
        return torch.fft.irfft2(out, s=(height, width))


class Afno(torch.nn.Module):
    """The mixer of FourCastNet: blocks of channels, all as real products."""

    def __init__(self, channels, blocks, threshold=0.01, kept=1.0):
        super().__init__()
        self.blocks, self.size = blocks, channels // blocks
        self.threshold, self.kept = threshold, kept
        shape = (2, blocks, self.size, self.size)
        self.w1 = torch.nn.Parameter(0.3 * torch.randn(shape, dtype=torch.double))
        self.w2 = torch.nn.Parameter(0.3 * torch.randn(shape, dtype=torch.double))
        bias = (2, blocks, self.size)
        self.b1 = torch.nn.Parameter(0.3 * torch.randn(bias, dtype=torch.double))
        self.b2 = torch.nn.Parameter(0.3 * torch.randn(bias, dtype=torch.double))

    def forward(self, x):
        bias = x
        batch, height, width, channels = x.shape
        x = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
        shape = batch, height, width // 2 + 1, self.blocks, self.size
        x = x.reshape(shape)
        o1_real = torch.zeros(shape, device=x.device, dtype=bias.dtype)
        o1_imag = torch.zeros(shape, device=x.device, dtype=bias.dtype)
        o2_real = torch.zeros(shape, device=x.device, dtype=bias.dtype)
        o2_imag = torch.zeros(shape, device=x.device, dtype=bias.dtype)
        total = height // 2 + 1
        kept = int(total * self.kept)
        modes = slice(None), slice(total - kept, total + kept), slice(None, kept)
        product = "...bi,bio->...bo"

        def times(a, w):
            return torch.einsum(product, a, w)

        o1_real[modes] = torch.relu(
            times(x[modes].real, self.w1[0])
            - times(x[modes].imag, self.w1[1])
            + self.b1[0]
        )
        o1_imag[modes] = torch.relu(
            times(x[modes].imag, self.w1[0])
            + times(x[modes].real, self.w1[1])
            + self.b1[1]
        )
        o2_real[modes] = (
            times(o1_real[modes], self.w2[0])
            - times(o1_imag[modes], self.w2[1])
            + self.b2[0]
        )
        o2_imag[modes] = (
            times(o1_imag[modes], self.w2[0])
            + times(o1_real[modes], self.w2[1])
            + self.b2[1]
        )
        x = torch.stack([o2_real, o2_imag], dim=-1)
        x = torch.nn.functional.softshrink(x, lambd=self.threshold)
        x = torch.view_as_complex(x).reshape(batch, height, width // 2 + 1, channels)
        return torch.fft.irfft2(x, s=(height, width), dim=(1, 2), norm="ortho") + bias


class OnMesh(torch.nn.Module):
    """A model that makes tensors and fills them, for check_op."""

    def __init__(self, model, mesh):
        super().__init__()
        self.model = model
        self.mesh = [mesh]  # not to be copied

    def __deepcopy__(self, memo):
        return OnMesh(copy.deepcopy(self.model, memo), self.mesh[0])

    def forward(self, x):
        if not isinstance(x, shardtensor.ShardTensor):
            return self.model(x)
        with shardtensor.new_tensors_on(self.mesh[0]):
            return self.model(x)
