"""Check and count values that the null driver does not compute, those of a detector's boxes among them."""

import torch
import torchvision
from torch.distributions import Bernoulli
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator

logits = torch.nn.Linear(64, 1024).cuda()(torch.randn(64, 64, device="cuda"))
Bernoulli(logits=logits).log_prob(torch.ones_like(logits)).sum().backward()
scores = torch.rand(20, device="cuda", requires_grad=True) * 2
mask = (scores > torch.rand(20, device="cuda")) & (scores > 0.5)
written = torch.zeros(20, device="cuda")
written[mask] = scores[mask]
written[mask] += 2
written.sum().backward()
lengths = torch.tensor([8, 12], device="cuda")
print(torch.segment_reduce(torch.rand(20, 4, device="cuda"), "sum", lengths=lengths).shape)
over = scores > 1
print(torch.arange(6, device="cuda").view(2, 3).repeat_interleave(2, dim=0).shape, bool(over.any() or over.all()))
unfinished = torch.ones(64, dtype=torch.long, device="cuda") & (logits.argmax(-1) != 1)
print("unfinished", unfinished.max().item())
boxes = torch.rand(50, 4, device="cuda")
print("boxes", len(torchvision.ops.nms(boxes, boxes[:, 0], 0.5)))


class Pyramid(torch.nn.Module):
    """Two levels of features."""

    out_channels = 32

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 32, 8, 8)

    def forward(self, images):
        features = self.first(images)
        return {"0": features, "1": torch.nn.functional.max_pool2d(features, 2)}


anchors = AnchorGenerator(((16,), (32,)), ((0.5, 1.0, 2.0),) * 2)
pool = torchvision.ops.MultiScaleRoIAlign(["0", "1"], 7, 2)
sizes = {"min_size": 128, "max_size": 160, "rpn_pre_nms_top_n_train": 200, "rpn_post_nms_top_n_train": 300}
model = FasterRCNN(Pyramid(), 5, rpn_anchor_generator=anchors, box_roi_pool=pool, **sizes).cuda()
corners = torch.rand(2, 3, 2) * 60  # as many as the device's own draws would leave: drawn after the weights
for _ in range(2):
    targets = [{"boxes": torch.cat([one, one + 40], 1).cuda(), "labels": torch.ones(3, dtype=torch.long).cuda()} for one in corners]
    with torch.autocast("cuda", torch.float16):
        losses = model(list(torch.rand(2, 3, 128, 160, device="cuda")), targets)
    sum(losses.values()).backward()
with torch.inference_mode():
    print("detected", len(model.eval()([torch.rand(3, 128, 160, device="cuda")])[0]["boxes"]))
