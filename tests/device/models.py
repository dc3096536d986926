"""Real models, small enough to be measured on two slow cores in seconds, and their published parameter counts."""

from __future__ import annotations

# Query of one cell -> parameters: torchvision's own num_params; for the presets what their publishers count.
REAL_MODELS = {
    "arch=torchvision:resnet18&image=64&dtype=float32&batch=2": 11_689_512,
    "arch=torchvision:mobilenet_v3_small&image=64&dtype=float32&batch=2&optimizer=sgd-momentum": 2_542_856,
    "arch=torchvision:efficientnet_b0&image=64&mode=inference&dtype=float32&batch=2": 5_288_548,
    "arch=torchvision:convnext_tiny&image=64&dtype=bfloat16&batch=2&optimizer=sgd": 28_589_128,
    "arch=torchvision:swin_t&mode=inference&dtype=float32&batch=1": 28_288_354,
    "arch=hf:all-minilm-l6-v2&seq=32&dtype=amp-bfloat16&batch=2": 22_713_216,
    "arch=hf:distilbert-base-uncased&seq=32&mode=inference&dtype=float32&batch=2": 66_985_530,
    "arch=hf:t5-small&seq=32&dtype=float32&batch=2&optimizer=adafactor": 60_506_624,
    "arch=hf:whisper-tiny&mode=inference&dtype=float32&batch=1": 37_760_640,
}
