"""The seed programs as written by their users, at sizes of the caller.

test_seeds.py replaces the import of autocast and GradScaler.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"


def checkerboard(size=512, width=256, steps=500, script=False):
    axis = torch.arange(size) / size
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    inputs = torch.stack([x, y]).unsqueeze(0).to(device)
    targets = (inputs * 8).floor().sum(dim=1, keepdim=True).remainder(2)

    layers = []
    for channels in (2, width, width):
        layers += [nn.Conv2d(channels, width, 1), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(width, 1, 1)).to(device)
    model = torch.jit.script(model) if script else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast():
            outputs = model(inputs)
            loss = F.mse_loss(outputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return model, optimizer, scaler, outputs, losses


class Samples(Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 10)
        self.y = torch.randn(count, 1) * 5 + 10

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def regression(count=10_000, epochs=10):
    loader = DataLoader(Samples(count), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler(init_scale=2.0**10)

    losses = []
    for _ in range(epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            with autocast():
                outputs = model(x)
                loss = F.mse_loss(outputs, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return model, optimizer, scaler, outputs, losses


def digits(batches, epochs=2):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    losses = []
    for _ in range(epochs):
        for images, labels in batches:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            with autocast():
                outputs = model(images)
                loss = F.cross_entropy(outputs, labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return model, optimizer, scaler, outputs, losses


@autocast()
def operand_dtypes():
    a = torch.randn(8, 8, device=device)
    b = torch.randn(8, 8, device=device)
    half = b.half()
    return [(a + b).dtype, (a + half).dtype, (a @ b).dtype]


def softmax():
    with autocast():
        logits = torch.tensor([[1000.0, 0.0]], device=device)
        probabilities = logits.softmax(dim=1)
        loss = F.cross_entropy(logits, torch.tensor([1], device=device))
    return probabilities.tolist(), loss.item(), loss.dtype
