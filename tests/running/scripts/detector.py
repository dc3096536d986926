"""A detector that trains: proposals, matched boxes and masks."""

import torch
from torchvision.models.detection import maskrcnn_resnet50_fpn

torch.manual_seed(0)
model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5, min_size=256).cuda().train()
optimizer = torch.optim.AdamW(model.parameters())
images = [torch.rand(3, 240, 320, device="cuda") for _ in range(2)]
boxes, labels = torch.tensor([[10.0, 20.0, 200.0, 220.0], [50.0, 60.0, 150.0, 160.0]]).cuda(), torch.tensor([1, 2]).cuda()
targets = [{"boxes": boxes, "labels": labels, "masks": torch.ones(2, 240, 320, dtype=torch.uint8).cuda()} for _ in images]
for _ in range(2):
    sum(model(images, targets).values()).backward()
    optimizer.step()
    optimizer.zero_grad()
