"""Mean and spread per channel, by stream, in the order of the channels; kept as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.moments import Moments


@dataclass(frozen=True)
class GridStatistics:
    """Stream -> channel -> moments; the order of the channels is a part of it and is checked.

    Statistics are of the values after log1p.
    """

    streams: Mapping[str, Mapping[str, Moments]]

    @staticmethod
    def from_arrays(stream: str, channels: Sequence[str], mean: np.ndarray, std: np.ndarray) -> "GridStatistics":
        """Of arrays `(channel,)`, such as `means.npy` and `stds.npy` beside a store, and the names of their entries.

        Raises:
            DataError: not as many entries as channels, or a spread that is not positive.
        """
        mean, std = np.asarray(mean, np.float64).reshape(-1), np.asarray(std, np.float64).reshape(-1)
        if not len(channels) == len(mean) == len(std):
            raise DataError(f"statistics of {len(channels)} channels have {len(mean)} means and {len(std)} spreads")
        if not (np.isfinite(mean).all() and (np.isfinite(std) & (std > 0)).all()):
            bad = channels[int(np.argmin(np.isfinite(mean) & np.isfinite(std) & (std > 0)))]
            raise DataError(f"statistics of {bad} are not a finite mean and a positive spread")
        columns = {
            name: Moments(1, mean[i : i + 1], std[i : i + 1] ** 2, mean[i : i + 1], mean[i : i + 1])
            for i, name in enumerate(channels)
        }
        return GridStatistics({stream: columns})

    def table(self, stream: str, channels: Sequence[str], where: str) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation `(channel, 1, 1)`, float32; the spread of a constant channel is 1.

        Raises:
            DataError: the statistics are of other channels, or of another order.
        """
        have = self.channels(stream)
        if lacking := [c for c in channels if c not in have]:
            raise DataError(f"{where}: statistics of stream {stream!r} lack {', '.join(lacking)}; they have {have}")
        if have != tuple(channels):
            place = next(i for i, c in enumerate(channels) if i >= len(have) or have[i] != c)
            raise DataError(
                f"{where}: statistics of stream {stream!r} are in another channel order: number {place} is "
                f"{have[place]!r} there and {channels[place]!r} in the stream; if the names can be trusted, use "
                "statistics.reordered(stream, channels)"
            )
        columns = [self.streams[stream][c] for c in channels]
        mean = np.array([m.mean[0] for m in columns])
        std = np.array([m.std[0] if m.std[0] > 0 else 1.0 for m in columns])
        return mean[:, None, None].astype(np.float32), std[:, None, None].astype(np.float32)

    def channels(self, stream: str) -> tuple[str, ...]:
        """The channels of a stream, in order."""
        if stream not in self.streams:
            raise DataError(f"no statistics of stream {stream!r}, only of {', '.join(self.streams)}")
        return tuple(self.streams[stream])

    def reordered(self, stream: str, channels: Sequence[str]) -> "GridStatistics":
        """With the channels of one stream picked by name, in this order."""
        have = self.channels(stream)
        if lacking := [c for c in channels if c not in have]:
            raise DataError(f"statistics of stream {stream!r} lack {', '.join(lacking)}; they have {have}")
        return GridStatistics({**self.streams, stream: {c: self.streams[stream][c] for c in channels}})

    def merged(self, other: "GridStatistics") -> "GridStatistics":
        """The streams of both; those of `other` win."""
        return GridStatistics({**self.streams, **other.streams})

    def renamed(self, **names: str) -> "GridStatistics":
        """Streams under further names: `renamed(next="past")` gives the stream "next" the statistics of "past"."""
        return GridStatistics({**self.streams, **{new: self.streams[old] for new, old in names.items()}})

    def normalise(self, stream: str, x: Tensor) -> Tensor:
        """`(x - mean) / std` of `(..., channel, y, x)`, plain or ShardTensor."""
        mean, std = self._like(stream, x)
        return (x - mean) / std

    def denormalise(self, stream: str, x: Tensor) -> Tensor:
        """The inverse of `normalise`; log1p, if any, is not undone."""
        mean, std = self._like(stream, x)
        return x * std + mean

    def _like(self, stream: str, x: Tensor) -> tuple[Tensor, Tensor]:
        channels = self.channels(stream)
        if x.ndim < 3 or x.shape[-3] != len(channels):
            raise DataError(f"expected (..., {len(channels)}, y, x) for stream {stream!r}, got {tuple(x.shape)}")
        mean, std = self.table(stream, channels, "")
        return torch.as_tensor(mean, dtype=x.dtype, device=x.device), torch.as_tensor(
            std, dtype=x.dtype, device=x.device
        )

    def save(self, file: Path) -> None:
        """Write JSON."""
        keys = ("mean", "m2", "low", "high")
        table = {
            stream: {
                name: {"count": m.count, **{key: getattr(m, key).tolist() for key in keys}}
                for name, m in columns.items()
            }
            for stream, columns in self.streams.items()
        }
        file.write_text(json.dumps(table, indent=1))

    @staticmethod
    def load(file: Path) -> "GridStatistics":
        """Read what `save` wrote."""
        keys = ("mean", "m2", "low", "high")
        try:
            table = json.loads(file.read_text())
            return GridStatistics(
                {
                    stream: {n: Moments(r["count"], *(np.array(r[key]) for key in keys)) for n, r in columns.items()}
                    for stream, columns in table.items()
                }
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{file} is no file of grid statistics ({error!r})") from error
