"""Noise removal from sound: a mask for its spectrum by a convolution and a recurrent layer whose batch comes first."""

import torch
from torch import nn

RATE = {"n_fft": 256, "hop_length": 64}


class Mask(nn.Module):
    """Return sound without noise."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 32, 3, padding=1)
        self.gru = nn.GRU(32 * 129, 256, batch_first=True, bidirectional=True)
        self.out = nn.Linear(512, 129 * 2)

    def forward(self, sound):
        """Mask the spectrum of sound of shape (batch, samples)."""
        window = torch.hann_window(256, device=sound.device)
        spectrum = torch.stft(sound, **RATE, window=window, return_complex=True)
        parts = torch.view_as_real(spectrum).permute(0, 3, 1, 2)
        features, _ = self.gru(self.conv(parts).relu().permute(0, 3, 1, 2).flatten(2))
        mask = self.out(features).view(*features.shape[:2], 129, 2).permute(0, 2, 1, 3).tanh().contiguous()
        return torch.istft(spectrum * torch.view_as_complex(mask), **RATE, window=window, length=sound.shape[-1])


model = Mask().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    sound = torch.randn(8, 8000, device="cuda")
    clean = model(sound)
    loss = (clean - sound).abs().mean() + (torch.fft.rfft(clean).abs() - torch.fft.rfft(sound).abs()).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
