"""Two optimizers in a loop, float16 with a GradScaler, and an exit if the loss is not finite."""

import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda")
generator = nn.Sequential(
    nn.ConvTranspose2d(64, 128, 4, 1, 0), nn.BatchNorm2d(128), nn.ReLU(), nn.ConvTranspose2d(128, 3, 4, 2, 1), nn.Tanh()
).to(device)
critic = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64 * 16, 1)
).to(device)
for_generator, for_critic = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
scaler, criterion = torch.amp.GradScaler("cuda"), nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(64, 1, device=device), torch.zeros(64, 1, device=device)
for number in range(10):
    real = torch.randn(64, 3, 8, 8).to(device)
    with torch.autocast("cuda", torch.float16):
        fake = generator(torch.randn(64, 64, 1, 1, device=device))
        loss = criterion(critic(real), ones) + criterion(critic(fake.detach()), zeros)
    for_critic.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(for_critic)
    with torch.autocast("cuda", torch.float16):
        second = criterion(critic(fake), ones)
    for_generator.zero_grad()
    scaler.scale(second).backward()
    scaler.step(for_generator)
    scaler.update()
    if not torch.isfinite(loss):
        raise RuntimeError("the loss is not finite")
    print("step", number, "scale", scaler.get_scale())
