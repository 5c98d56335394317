"""The nets of the digits workloads, from images (n, 1, 8, 8) to 10 logits or back to the image."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

PIXELS = 64
CLASSES = 10
CODE = 12  # numbers that the autoencoder keeps of an image


def make_logistic() -> nn.Module:
    """One linear layer: convex, so its best quality is known."""
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES))


def make_mlp() -> nn.Module:
    """64 pixels, 64 hidden, 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def make_lenet() -> nn.Module:
    """Two convolutions with BatchNorm and pooling, then two linear layers."""
    return nn.Sequential(
        *_convolution(1, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *_convolution(16, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def make_resnet() -> nn.Module:
    """Six convolutions with BatchNorm, four of them in residual blocks; the mean over the image."""
    return nn.Sequential(
        *_convolution(1, 16),
        nn.ReLU(),
        Residual(16),
        nn.MaxPool2d(2),
        *_convolution(16, 32),
        nn.ReLU(),
        Residual(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def make_autoencoder() -> nn.Module:
    """64 pixels to a code of 12 numbers and back, 0..1 as the pixels are."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(PIXELS, 48),
        nn.ReLU(),
        nn.Linear(48, CODE),
        nn.Linear(CODE, 48),
        nn.ReLU(),
        nn.Linear(48, PIXELS),
        nn.Sigmoid(),
        nn.Unflatten(1, (1, 8, 8)),
    )


class Residual(nn.Module):
    """Two convolutions around which the input goes, too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, channels), nn.ReLU(), *_convolution(channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, height, width) to the same shape."""
        return F.relu(x + self.body(x))


def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, nn.Module]:
    """3 x 3 with BatchNorm, which makes a bias useless."""
    return (
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
    )
