"""A small network that predicts arrival delays, its training data in batches, and inference. Imports no Dagster.

Same inputs, same bits: one thread adds in one order, and every source of randomness is seeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from example_project.features import CATEGORIES, KEYS, NUMBERS, TARGET

SEED = 2013
STEPS = 2_000
BATCH = 1_024
HIDDEN = 128
EMBEDDING = 8

Batch = tuple[Tensor, Tensor, Tensor]


def encode(features: pd.DataFrame) -> tuple[Tensor, Tensor]:
    """Return the numbers (rows x NUMBERS, NaN where unknown) and the categories as codes (rows x CATEGORIES)."""
    numbers = torch.from_numpy(features[NUMBERS].to_numpy(np.float32))
    columns = [features[name].map(_code, na_action="ignore").to_numpy(np.int64) for name in CATEGORIES]
    return numbers, torch.from_numpy(np.stack(columns, axis=1))


def _code(value: str | int) -> int:
    """Return a category as a number that depends on nothing else, so that all months agree on it."""
    return int.from_bytes(value.encode(), "big") if isinstance(value, str) else int(value)


class Category(nn.Module):
    """Embeds one category. Row 0 stands for codes that training did not see.

    The vocabulary is a buffer: it travels with the weights, so that predictions cannot use another one.
    """

    known: Tensor

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("known", known)
        self.embedding = nn.Embedding(len(known) + 1, EMBEDDING)

    def forward(self, codes: Tensor) -> Tensor:
        """Return one vector per code."""
        place = torch.searchsorted(self.known, codes).clamp(max=len(self.known) - 1)
        vectors: Tensor = self.embedding(torch.where(self.known[place] == codes, place + 1, 0))
        return vectors


class DelayModel(nn.Module):
    """Predicts the arrival delay in minutes as an offset from the training median.

    Normalisation statistics are buffers, taken from the training months alone.
    """

    mean: Tensor
    scale: Tensor
    median: Tensor

    def __init__(self, known: Sequence[Tensor], mean: Tensor, scale: Tensor, median: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        self.register_buffer("median", median)
        self.categories = nn.ModuleList(Category(codes) for codes in known)
        width = len(mean) + EMBEDDING * len(known)
        # Hourly weather tells the days apart, and a freer network learns the days of training by heart. How much to
        # drop was chosen on months held out among January to September, never on the months of the report.
        self.layers = nn.Sequential(
            nn.Linear(width, HIDDEN), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(HIDDEN, 1),
        )  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> DelayModel:
        """Rebuild a model from its state dict, which holds vocabularies and statistics beside the weights."""
        known = [state[f"categories.{place}.known"] for place in range(len(CATEGORIES))]
        model = cls(known, state["mean"], state["scale"], state["median"])
        model.load_state_dict(state)
        return model

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the delay of each row. A missing number counts as average; extremes are cut at five deviations."""
        inputs = [((numbers - self.mean) / self.scale).nan_to_num(0.0).clamp(-5.0, 5.0)]
        inputs += [category(codes[:, place].contiguous()) for place, category in enumerate(self.categories)]
        offset: Tensor = self.layers(torch.cat(inputs, dim=1))[:, 0]
        return self.median + 30.0 * offset


class Rows(Dataset[Batch]):
    """The training rows. A batch is cut out of the tensors at once: 1,024 single rows would cost more than the step."""

    def __init__(self, numbers: Tensor, codes: Tensor, delays: Tensor) -> None:
        self.numbers, self.codes, self.delays = numbers, codes, delays

    def __len__(self) -> int:
        return len(self.delays)

    def __getitem__(self, row: int) -> Batch:
        return self.numbers[row], self.codes[row], self.delays[row]

    def __getitems__(self, rows: list[int]) -> Batch:
        """Return a whole batch (torch's DataLoader calls this where it exists)."""
        wanted = torch.tensor(rows)
        return self.numbers[wanted], self.codes[wanted], self.delays[wanted]


def as_is(batch: Any) -> Any:
    """Collate nothing: `Rows` already returns batches."""
    return batch


@dataclass
class Training:
    """What a training loop needs.

    Attributes:
        model: The network.
        optimizer: AdamW. Strong weight decay, because autumn differs from the months trained on.
        scheduler: One warm-up and one decay over all steps.
        loader: Shuffled batches; the order of all epochs follows from its seed.
    """

    model: DelayModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: DataLoader[Batch]

    def update(self, batch: Batch) -> float:
        """Take one training step and return its loss: the mean absolute error, because that is what the report asks."""
        numbers, codes, delays = batch
        self.optimizer.zero_grad()
        loss = (self.model(numbers, codes) - delays).abs().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())


def build_training(features: pd.DataFrame, steps: int = STEPS) -> Training:
    """Return a fresh model, optimizer, scheduler and loader for the flights that arrived."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    arrived = features[features[TARGET].notna()]
    numbers, codes = encode(arrived)
    delays = torch.from_numpy(arrived[TARGET].to_numpy(np.float32))
    known = [torch.from_numpy(np.unique(column)) for column in codes.numpy().T]
    statistics = arrived[NUMBERS].agg(["mean", "std"]).to_numpy(np.float32)
    model = DelayModel(known, torch.tensor(statistics[0]), torch.tensor(statistics[1]), delays.median())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    order = torch.Generator().manual_seed(SEED)
    rows = Rows(numbers, codes, delays)
    loader = DataLoader(rows, BATCH, shuffle=True, drop_last=True, generator=order, collate_fn=as_is)
    return Training(model, optimizer, scheduler, loader)


def predict(state: Mapping[str, Tensor], features: pd.DataFrame, rows: int = 256) -> pd.DataFrame:
    """Return the keys of all flights with their predicted arrival delay in minutes, computed some rows at a time."""
    torch.set_num_threads(1)
    model = DelayModel.from_state(state).eval()
    with torch.inference_mode():
        delays = [model(*encode(features[at : at + rows])) for at in range(0, len(features), rows)]
    return features[KEYS].assign(predicted_delay=torch.cat(delays).numpy())
