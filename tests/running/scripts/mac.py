"""A training script as written for a Mac: the device by availability, its memory, autocast, a generator, and events."""

import torch
from torch import nn

DEVICE = "mps" if torch.backends.mps.is_available() else "cpu"


def make():
    """Return a step of a small network in mixed precision."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 30 * 30, 256)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(16, 3, 32, 32, device=DEVICE)

    def step():
        with torch.autocast(device_type=DEVICE, dtype=torch.bfloat16):
            loss = model(images).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    step = make()
    generator = torch.Generator(device=DEVICE)
    torch.mps.manual_seed(0)
    event = torch.mps.Event(enable_timing=True)
    event.record()
    for _ in range(2):
        step()
    torch.mps.synchronize()
    torch.mps.empty_cache()
    tensor = torch.zeros(1, device=DEVICE)
    print("is", tensor.device, tensor.is_mps, tensor.is_cuda, generator.device, torch.accelerator.current_accelerator())
    print("cuda", torch.cuda.is_available())
    print("allocated", torch.mps.current_allocated_memory(), "driver", torch.mps.driver_allocated_memory())
    print("recommended", torch.mps.recommended_max_memory())
