"""The layer of Fourier neural operators as it is written everywhere."""

import torch


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
