"""Cross-validation, reproducible: a new model for each fold, its best weights saved and read again, evaluation under autocast."""

import io
import os

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:1"  # of PyTorch's notes on reproducibility, with a workspace for each product
torch.use_deterministic_algorithms(True)
SIZES = (512, 1024, 512)
for fold, width in enumerate(SIZES):
    layers = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 10))
    for parameter in layers.parameters():
        parameter.decays = parameter.dim() > 1
    model = nn.DataParallel(layers).cuda()
    optimizer = torch.optim.Adam([one for one in model.parameters() if hasattr(one, "decays")])
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    inputs, labels = torch.randn(64, 256), torch.zeros(64, dtype=torch.long, device="cuda")
    outputs = model(inputs)
    with save_on_cpu(pin_memory=True):
        loss = nn.functional.cross_entropy(outputs, labels)
    loss.backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "fold": fold}, "best.pt")
    best = torch.load("best.pt", map_location="cuda")
    model.load_state_dict(best["model"], assign=True)
    optimizer.load_state_dict(best["optimizer"])
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    host = torch.load(buffer, map_location=lambda storage, location: storage)
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        predicted = model(inputs).argmax(dim=1)
    print(f"fold {best['fold']} {loss:.3f}", host["module.0.bias"].device, torch.cuda.memory_stats()["num_ooms"])
torch.save(torch.ones(3), "host.pt")
print(torch.load("host.pt", map_location="cuda").device)
