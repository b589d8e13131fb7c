"""Rounding to MXFP4: E2M1 values under one power-of-two scale per 32 columns."""

import torch
from torch import Tensor


def encode(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round `weight` (…, R, C) to the nearest code, C a multiple of 32.

    Returns codes 0…15 as uint8 (…, R, C), scale bytes (…, R, C/32), and the values they stand for.
    Source: OCP Microscaling Formats 1.0, section 5.3; the scale keeps the largest value below 8.
    """
    groups = weight.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    exponent = torch.floor(torch.log2(largest)) - 2.0
    scaled = groups / torch.exp2(exponent)
    size = scaled.abs().clamp_max(6.0)
    # Steps of 0.5 below 2, of 1 below 4, of 2 above: the E2M1 values.
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    size = torch.round(size / step) * step
    value = torch.copysign(size, scaled)
    index = torch.where(size < 2.0, size * 2, torch.where(size < 4.0, size + 2, size / 2 + 4))
    codes = index.to(torch.uint8) + 8 * (torch.signbit(value) & (size > 0)).to(torch.uint8)
    scale = (exponent.squeeze(-1) + 127).to(torch.uint8)
    rounded = (value * torch.exp2(exponent)).flatten(-2)
    return codes.flatten(-2), scale, rounded


def pack(codes: Tensor) -> Tensor:
    """Put two codes in a byte, the even column in the low nibble: (…, C) -> (…, C/2)."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def round_through(weight: Tensor) -> Tensor:
    """Use rounded weights in the forward pass and pass gradients straight through."""
    with torch.no_grad():
        rounded = encode(weight)[2]
    return weight + (rounded - weight).detach()
