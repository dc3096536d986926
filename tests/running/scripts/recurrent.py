"""An LSTM over packed sequences, whose weights PyTorch makes views of one buffer on the device."""

import torch
from torch import nn

embedding, layers = nn.Embedding(5000, 256), nn.LSTM(256, 512, 2, batch_first=True, bidirectional=True)
model = nn.ModuleList([embedding, layers, nn.Linear(1024, 40)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    lengths = torch.full((16,), 100)
    words, labels = torch.randint(0, 5000, (16, 100)).cuda(), torch.randint(0, 40, (1600,)).cuda()
    packed = nn.utils.rnn.pack_padded_sequence(embedding(words), lengths, batch_first=True, enforce_sorted=False)
    states, _ = layers(packed)
    loss = nn.functional.cross_entropy(model[2](states.data), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
