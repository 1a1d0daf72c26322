"""The shallow-water equations on the rotating Earth, by spherical harmonics, and a
spherical Fourier neural operator. Neither knows whether its tensors are sharded."""

import torch
import torch_harmonics as th
from torch import nn
from torch_harmonics.quadrature import legendre_gauss_weights

RADIUS = 6.37122e6  # m
OMEGA = 7.292e-5  # 1 / s
GEOPOTENTIAL = 9.80616 * 10e3  # of the mean depth, m^2 / s^2


class ShallowWater(nn.Module):
    """Geopotential, vorticity and divergence, (..., 3, latitudes, longitudes) of a
    Gauss grid, advanced by Runge and Kutta's fourth-order steps."""

    def __init__(self, latitudes, longitudes, step=600.0):
        super().__init__()
        self.step = step
        modes = 2 * latitudes // 3  # products of two fields are not aliased
        grid = {"lmax": modes, "mmax": modes, "grid": "legendre-gauss"}
        sizes = latitudes, longitudes
        self.there = th.RealSHT(*sizes, **grid)
        self.back = th.InverseRealSHT(*sizes, **grid)
        self.vector_there = th.RealVectorSHT(*sizes, **grid)
        self.vector_back = th.InverseRealVectorSHT(*sizes, **grid)
        degree = torch.arange(modes, dtype=torch.float64)[:, None]
        laplace = -degree * (degree + 1) / RADIUS**2
        inverse = torch.where(degree > 0, 1 / laplace.clamp(max=-1e-20), 0.0)
        damping = torch.exp(-(step / 7200) * (laplace / laplace[-1]) ** 4)
        self.register_buffer("laplace", laplace)
        self.register_buffer("inverse", inverse)
        self.register_buffer("damping", damping)
        self.register_buffer("coriolis", 2 * OMEGA * sines(latitudes)[:, None])

    def forward(self, fields, steps):
        state = self.there(fields)
        for _ in range(steps):
            state = self.damping * self.advanced(state)
        return self.back(state)

    def advanced(self, state):
        first = self.tendency(state)
        second = self.tendency(state + self.step / 2 * first)
        third = self.tendency(state + self.step / 2 * second)
        fourth = self.tendency(state + self.step * third)
        return state + self.step / 6 * (first + 2 * second + 2 * third + fourth)

    def tendency(self, state):
        geopotential, vorticity, _ = self.back(state).unbind(-3)
        wind = self.wind(state[..., 1:, :, :])
        turned = self.curl_and_divergence(
            wind * (vorticity + self.coriolis).unsqueeze(-3)
        )
        flux = self.curl_and_divergence(wind * geopotential.unsqueeze(-3))
        energy = self.there(geopotential + wind.square().sum(-3) / 2)
        return torch.stack(
            [
                -flux[..., 1, :, :],
                -turned[..., 1, :, :],
                turned[..., 0, :, :] - self.laplace * energy,
            ],
            -3,
        )

    def wind(self, curl_and_divergence):
        return self.vector_back(self.inverse * curl_and_divergence / RADIUS)

    def curl_and_divergence(self, wind):
        return self.laplace * RADIUS * self.vector_there(wind)


def sines(latitudes):
    """Of the latitudes of a Gauss grid, north first."""
    nodes, _ = legendre_gauss_weights(latitudes, -1, 1)
    return -nodes


def weather(count, latitudes, longitudes, seed=0, largest=8):
    """Random smooth flows, (count, 3, latitudes, longitudes) float64, whose depth is
    that of the mean: waves run from the first hour on."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    back = th.InverseRealSHT(
        latitudes, longitudes, lmax=largest, mmax=largest, grid="legendre-gauss"
    )
    shape = count, 3, largest, largest
    modes = torch.randn(shape, generator=generator, dtype=torch.cdouble).tril()
    modes[..., 0, :] = 0
    fields = back(modes)
    fields = fields / fields.std(dim=(-2, -1), keepdim=True)
    scale = torch.tensor([0.01 * GEOPOTENTIAL, 1e-5, 1e-6], dtype=torch.float64)
    mean = torch.tensor([GEOPOTENTIAL, 0, 0], dtype=torch.float64)
    return mean[:, None, None] + scale[:, None, None] * fields


class SphericalBlock(nn.Module):
    """A filter by degree, mixing channels, beside a product at each point."""

    def __init__(self, there, back, channels):
        super().__init__()
        self.there, self.back = there, back
        shape = channels, channels, there.lmax
        self.filter = nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / channels)
        self.skip = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        modes = torch.einsum("bilm,iol->bolm", self.there(x), self.filter)
        return nn.functional.gelu(self.back(modes) + self.skip(x))


class SphericalOperator(nn.Module):
    """What a step changes in the fields."""

    def __init__(self, latitudes, longitudes, channels=16, blocks=2):
        super().__init__()
        modes = 2 * latitudes // 3
        grid = {"lmax": modes, "mmax": modes, "grid": "legendre-gauss"}
        there = th.RealSHT(latitudes, longitudes, **grid)
        back = th.InverseRealSHT(latitudes, longitudes, **grid)
        self.lift = nn.Conv2d(3, channels, 1)
        self.blocks = nn.Sequential(
            *(SphericalBlock(there, back, channels) for _ in range(blocks))
        )
        self.project = nn.Conv2d(channels, 3, 1)

    def forward(self, fields):
        return fields + self.project(self.blocks(self.lift(fields)))
